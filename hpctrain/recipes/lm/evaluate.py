"""The validation loss of one checkpoint of the recipe, in a job of its own beside the training.

hpctrain submit --set "evaluate.script=-m hpctrain.recipes.lm.evaluate"

Written like any user's own. tests/engines/test_evaluation.py holds the promises.
"""

from __future__ import annotations

import hpctrain
from hpctrain import ModelPlan, TokenFile
from hpctrain.ledger.plan.mesh import shape_of
from hpctrain.recipes.lm.train import make_model, split, validate


def main() -> None:
    """Report the mean loss on text that is never trained on: that of the run, as it cut it."""
    run, evaluation = hpctrain.init(), hpctrain.evaluation()
    train = run.settings.train
    tokens = TokenFile(evaluation.checkpoint.parents[1] / "data" / "tokens.bin")
    _, held_out = split(tokens, train)
    plan = ModelPlan(shape=shape_of(train), loss_parallel=True)
    engine = run.parallelize(*make_model(train), plan=plan)
    evaluation.load(engine)
    loss = validate(run, engine, tokens, held_out)
    if loss is not None:
        evaluation.report(loss=loss)
    run.leave()


if __name__ == "__main__":
    main()
