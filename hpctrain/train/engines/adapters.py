"""Models that peft has wrapped: adapters are trained and saved, what they adapt is read again.

The weights that stay as they are come from the program or from a folder at every start, so a
checkpoint leaves them out. It holds a digest of them instead, and goes on with no others; and the
adapters' config, which an export writes. tests/engines/test_adapters.py holds the promises.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from hpctrain.core.world import broadcast
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.train.engines.pretrained import Pretrained

SAMPLED = 64
"""Values of each tensor that the digest is made of, its first ones."""
INITS = (True, False, "gaussian")
"""Of LoRA: they ask nothing of the weights that are adapted."""


class BaseWeights:
    """The weights that adapters stand on: those that no checkpoint holds; `names` in the model."""

    def __init__(self, names: frozenset[str], digest: str, source: str, config: Any) -> None:
        """Use `base_weights`."""
        self.names = names
        self._state = {"digest": digest, "source": source, "adapter_config": config}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: which weights they are, and the adapters' config."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold a checkpoint's against these.

        Raises:
            CheckpointError: its adapters were trained on others.
        """
        if state["digest"] != self._state["digest"]:
            raise CheckpointError(
                f"the adapters were trained on the weights of {state['source']}, and those of "
                f"{self._state['source']} are others now; give the ones that they began with"
            )


def is_adapted(model: nn.Module) -> bool:
    """Whether peft has wrapped this model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_weights(
    model: nn.Module, pretrained: Pretrained | None, source: str, world: World
) -> BaseWeights | None:
    """Return what of a wrapped model no checkpoint holds; None if nothing. Collective.

    A `model` on the meta device gets its values from `pretrained`. `source` names their origin in
    messages.

    Raises:
        UsageError: the adapters are of a kind that could not be made or exported.
    """
    if not is_adapted(model):
        return None
    config = _config_of(model, is_built=pretrained is not None)
    trained = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    values = model.state_dict()
    names = frozenset(
        name
        for name in values
        if name not in trained and (pretrained is None or name in pretrained)
    )
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names) if world.rank == 0 else []:
        first = values[name].reshape(-1) if pretrained is None else pretrained.first(name, SAMPLED)
        sample = first[:SAMPLED].detach().cpu().float()
        digest.update(f"{name} {tuple(values[name].shape)}".encode())
        digest.update(sample.numpy().tobytes())
    if pretrained is not None:
        pretrained.agree(world)
    return BaseWeights(names, broadcast(world, digest.hexdigest()), source, config)


def refuse_adapted(model: nn.Module, settings: EngineSettings, mesh: Mesh) -> None:
    """Adapters are tested where whole layers are copied or sharded.

    Raises:
        UsageError: the engine is another one.
    """
    axes = [axis for axis in ("tp", "pp", "ep") if getattr(mesh, axis) > 1]
    if is_adapted(model) and (axes or settings.kind.startswith("zero")):
        named = f"engine.{axes[0]} {getattr(mesh, axes[0])}" if axes else f"engine {settings.kind}"
        raise UsageError(
            f"{named} does not train the adapters of peft; choose ddp, or fsdp2 without tp, pp, ep"
        )


def _config_of(model: Any, *, is_built: bool) -> Any:
    """The adapters' config as peft writes it."""
    if len(model.peft_config) != 1 or "default" not in model.peft_config:
        raise UsageError(
            f"the model has the adapters {', '.join(sorted(model.peft_config))}; one is trained, "
            "under the name default"
        )
    config: dict[str, Any] = model.peft_config["default"].to_dict()
    kind = str(getattr(config["peft_type"], "value", config["peft_type"]))
    if kind != "LORA":
        raise UsageError(f"adapters of type {kind} are not trained here; LORA is")
    if is_built:
        init, dora = config.get("init_lora_weights"), config.get("use_dora")
        if not any(init is known or init == known for known in INITS) or dora:
            how = "use_dora" if dora else f"init_lora_weights = {init!r}"
            raise UsageError(
                f"{how} begins with values of the weights that are adapted, which are not there "
                "while a function builds the model; give run.parallelize the model itself"
            )
    return json.loads(json.dumps(config, default=_plain_json))


def _plain_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
