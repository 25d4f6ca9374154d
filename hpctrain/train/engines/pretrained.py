"""Weights of a Hugging Face folder, read by range into what each rank keeps; and peft's adapters.

Each rank then reads the rows of its own shards: no rank holds a whole model, nor a whole file. What
the folder lacks is left to the model's own constructor; what the model lacks, or has in another
shape, is refused before anything is read.

Of a model that peft has wrapped, checkpoints hold the adapters, their config, and a digest of the
weights under them, which every start reads again. tests/engines/test_pretrained.py and
test_adapters.py hold the promises.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.exchange import naming, safetensors
from hpctrain.checkpoint.exchange.contents import CONVERTED, MODEL, same
from hpctrain.checkpoint.exchange.naming import NameRequest
from hpctrain.checkpoint.tensors.boxes import DTYPES
from hpctrain.core.world import broadcast, gather, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch import nn

    from hpctrain.checkpoint.exchange.contents import Contents
    from hpctrain.checkpoint.exchange.safetensors import StoredTensor
    from hpctrain.checkpoint.tensors.boxes import Held
    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World


log = logging.getLogger("hpctrain.engines")

READ_BYTES = 16 << 20
"""Host memory that a rank takes while it reads."""
TORCH = {word: dtype for dtype, word in DTYPES.items()}
_WIDENED = frozenset({torch.float16, torch.bfloat16})
WRAPPED = "base_model.model."
"""Before the names of a model that peft has wrapped."""
_LAYER = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)\.")
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Of older files: buffers that models make by themselves since, as transformers knows too."""


class Pretrained:
    """Where each tensor of a model lies in a folder's files.

    `problem` says why this rank could not read; `agree` reports it on every rank.
    """

    def __init__(self, tensors: Mapping[str, Sequence[StoredTensor]]) -> None:
        """Use `open_folder`.

        Args:
            tensors: By their names in the model; several for one that the model has tied, which
                must be the same.
        """
        self._tensors = tensors
        self.problem = ""

    def __contains__(self, name: object) -> bool:
        """Whether the folder has a value for this tensor of the model."""
        return name in self._tensors

    def read_into(self, name: str, box: Held) -> None:
        """Fill this rank's part of the model's tensor of this name. Not collective: see `agree`."""
        begin, extent = box.piece.begin, box.piece.extent
        try:
            for first, part in self._rows(name, begin[:1], extent[:1]):
                value = part
                for axis in range(1, len(extent)):
                    value = value.narrow(axis, begin[axis], extent[axis])
                local = box.local.narrow(0, first, len(part)) if extent else box.local
                local.copy_(value)
        except HpctrainError as error:
            self.problem = self.problem or str(error)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor's whole value on the CPU, 16 bits widened. Not collective: see `agree`."""
        stored = self._tensors[name][0]
        dtype = TORCH[stored.dtype]
        value = torch.zeros(stored.shape, dtype=torch.float32 if dtype in _WIDENED else dtype)
        try:
            for first, part in self._rows(name, (0,), stored.shape[:1]):
                (value.narrow(0, first, len(part)) if stored.shape else value).copy_(part)
        except HpctrainError as error:
            self.problem = self.problem or str(error)
        return value

    def first(self, name: str, count: int) -> torch.Tensor:
        """So many values from a tensor's beginning. Not collective: see `agree`."""
        stored = self._tensors[name][0]
        try:
            content = stored.start(count)
        except HpctrainError as error:
            self.problem = self.problem or str(error)
            return torch.empty(0)
        dtype = TORCH[stored.dtype]
        return torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(0)

    def _rows(
        self, name: str, begin: Sequence[int], extent: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """A range of a tensor's rows, a few at a time, each with its number in the range."""
        stored, *others = self._tensors[name]
        count = extent[0] if extent else 1
        row_bytes = stored.nbytes // stored.shape[0] if extent and stored.shape[0] else 1
        at_once = max(1, READ_BYTES // max(1, row_bytes))
        for first in range(0, count, at_once):
            rows = (begin[0] + first if extent else 0, min(at_once, count - first))
            content = stored.rows(*rows) if extent else stored.read()
            for other in others:
                if not same(content, other.rows(*rows) if extent else other.read()):
                    raise CheckpointError(
                        f"{stored.name} and {other.name} of {stored.path.parent} differ, and the "
                        "model ties them; build it with tie_word_embeddings = False in its config"
                    )
            part = torch.frombuffer(content, dtype=TORCH[stored.dtype]) if len(content) else None
            shape = (rows[1], *stored.shape[1:]) if extent else ()
            yield first, torch.empty(shape) if part is None else part.view(shape)

    def agree(self, world: World) -> None:
        """Raise on every rank what any has met. Collective.

        Raises:
            CheckpointError: a file cannot be read, was cut, or has two values for what is tied.
        """
        problems = [
            f"rank {n}: {text}" for n, text in enumerate(gather(world, self.problem)) if text
        ]
        if problems:
            raise CheckpointError(problems[0])


def open_folder(folder: str | Path, model: nn.Module, world: World) -> Pretrained:
    """Find a model's weights in a folder, by the headers of its files. Collective.

    The folder has `model.safetensors`, or several and their index. The model is as built, on the
    meta device.

    Raises:
        CheckpointError: files are cut or none, or hold what does not fit the model.
        NotFound: there is no such folder.
    """
    return Pretrained(on_rank_0(world, lambda: _tensors_of(Path(folder).expanduser(), model)))


def _tensors_of(folder: Path, model: nn.Module) -> dict[str, list[StoredTensor]]:
    if not folder.is_dir():
        raise NotFound(f"{folder}, which the model's weights come from, is not a folder here")
    own = model.state_dict(keep_vars=True)
    wanted = {name: _plain(name) for name in own}
    there = _named(safetensors.read(folder), model, set(wanted.values()))
    if there.keys().isdisjoint(wanted.values()):
        named = f"{min(there)} there, {min(wanted)} here" if there and wanted else "one has none"
        raise CheckpointError(f"{folder} holds none of the model's tensors ({named})")
    _refuse_others(folder, model, sorted(there.keys() - set(wanted.values())))
    groups = dict[int, list[str]]()
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    tensors: dict[str, list[StoredTensor]] = {}
    made: list[str] = []
    for tied in groups.values():
        stored = [there[wanted[name]] for name in tied if wanted[name] in there]
        for name in tied:
            for candidate in stored:
                _require_fits(folder, candidate, name, own[name])
            if stored:
                tensors[name] = stored
        if not stored:
            made.append(tied[0])
    log.info("weights of %s: %d tensors by range", folder, len(tensors))
    if made:
        log.warning("%s has no %s: made by the model's own init", folder, naming.some(made))
    return tensors


def _plain(name: str) -> str:
    if not name.startswith(WRAPPED):
        return name
    return _LAYER.sub(".", name.removeprefix(WRAPPED))


def _named(
    contents: Contents, model: nn.Module, wanted: AbstractSet[str]
) -> dict[str, StoredTensor]:
    """Return the folder's tensors by the model's names, which may lack or have its prefix."""
    base = getattr(model, "base_model_prefix", "") or "model"
    names = [
        str(leaf.path[0]).removeprefix(MODEL * contents.full_names) for leaf in contents.leaves
    ]
    requests = [NameRequest(model_only=True)]
    if not contents.full_names:
        requests.append(NameRequest(prefix=f"{MODEL}{base}."))
    if any(name.startswith(f"{base}.") for name in names):
        requests.append(NameRequest(renames=[(f"{base}.", "")], model_only=True))
    choices: list[dict[str, StoredTensor]] = []
    for request in requests:
        tensors, _ = naming.name_all(contents, request)
        own = [replace(tensor, name=tensor.name.removeprefix(MODEL)) for tensor in tensors]
        choices.append({tensor.name: tensor for tensor in own})  # type: ignore[misc]
    return max(choices, key=lambda choice: len(choice.keys() & wanted))


def _refuse_others(folder: Path, model: nn.Module, names: Sequence[str]) -> None:
    """What the model lacks is of another model; but for what transformers passes over as well."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_OLD_BUFFERS]
    others = [name for name in names if not any(re.search(one, name) for one in patterns)]
    if others:
        raise CheckpointError(
            f"{folder} holds {naming.some(others)}, which {type(model).__name__} does not have; "
            "build the model by the folder's config.json"
        )


def _require_fits(folder: Path, stored: StoredTensor, name: str, tensor: torch.Tensor) -> None:
    own = f"{DTYPES.get(tensor.dtype, tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
    if stored.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{folder} holds {name} as {stored.text} and the model's is {own}; build the model by "
            "the folder's config.json"
        )
    is_float = tensor.dtype.is_floating_point and stored.dtype in CONVERTED
    if not is_float and TORCH[stored.dtype] != tensor.dtype:
        raise CheckpointError(
            f"{folder} holds {name} as {stored.text} and the model's is {own}: quantized weights "
            "and other types are not read; convert the folder first"
        )


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
    is_set = (set, frozenset)
    text = json.dumps(config, default=lambda v: sorted(v) if isinstance(v, is_set) else str(v))
    return json.loads(text)
