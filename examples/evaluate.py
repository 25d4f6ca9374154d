"""Judge each checkpoint of examples/own_loop.py in a job of its own, while the training goes on.

hpctrain submit --set evaluate.script=examples/evaluate.py -- examples/own_loop.py
HPCTRAIN_CHECKPOINT=runs/NAME/checkpoints/step-0000000100 python examples/evaluate.py    # one, here
"""

import torch
from torch import nn

import hpctrain


def main() -> None:
    """Report how far the model is from the sine that it was to find."""
    evaluation = hpctrain.evaluation()  # 1: which checkpoint
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    evaluation.load(model)  # 2: its weights, every byte proved
    x = torch.linspace(-3, 3, 1001)[:, None]
    with torch.no_grad():
        error = (model(x) - torch.sin(x)).abs()
    evaluation.report(mean=error.mean(), largest=error.max())  # 3: status, TensorBoard, retention


if __name__ == "__main__":
    main()
