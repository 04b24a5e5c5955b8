"""Files of a checkpoint folder in the public layout, and the location of each tensor of the model in them.

Most tensors are in safetensors files. OpenVLA-OFT stores some modules separately: a proprio projector, a vision
backbone with FiLM (complete, replacing the one in the safetensors files) and an action head. A folder may also hold
only a LoRA adapter that names its base model, which may be such a folder, too. No code in the folder is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlvla.utils.data_files import admit, check_types, inside, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.torch_files import read_torch_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Evaluation results; they do not apply to weights trained from those in the folder.
EVALUATION_FILE = "eval.json"
# Evaluations in a policy folder; policies trained from it do not inherit them.
EVALUATIONS = re.compile(r"eval(_\d+)?\.(json|md)")
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"
PROPRIO_PREFIX = "proprio_projector."
VISION_PREFIX = "vision_backbone."
# Modules that OpenVLA-OFT stores in separate files, `{module}--{step}_checkpoint.pt` -> prefix in the model.
PARTS = {"proprio_projector": PROPRIO_PREFIX, "vision_backbone": VISION_PREFIX}
# Standard deviation beside a regression head. Specific to rlvla: OFT's actions are deterministic.
ACTION_STD_FILE = "action_std.safetensors"
NOT_THE_BODY = (ADAPTER_WEIGHTS_FILE, ACTION_STD_FILE)
# OFT's regression and diffusion heads: a checkpoint with one was not trained to emit action tokens.
HEAD_PATTERNS = ("action_head--*_checkpoint.pt", "noisy_action_projector--*_checkpoint.pt")
HEAD_PREFIX, STD_PREFIX = "action_head.", "action_std."
# OFT wraps every vision block for FiLM; the model here has no wrapper.
_FILM_WRAPPER = re.compile(r"(\.blocks\.\d+)\.block\.")
# In the names of the base weights of an adapted layer.
BASE_LAYER = ".base_layer."
_ADAPTER_PART = re.compile(r"\.lora_(A|B)(?:\.default)?\.weight$")
_ADAPTER_SETTINGS = {"r": int, "lora_alpha": float, "use_rslora": bool | None}
_LARGEST_RANK = 2**20
# OFT sets lora_alpha = min(rank, 16).
OFT_MAX_LORA_ALPHA = 16


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: the file.
        key: its name there.
        shape: its shape.
        content: the tensor, memory-mapped from a torch file; None for safetensors.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    content: Tensor | None = None

    def read(self) -> Tensor:
        """A copy of the tensor on the host: the file may be replaced while the model is in use."""
        if self.content is not None:
            return self.content.clone()
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.key).clone()


@dataclass(frozen=True)
class LowRank:
    """A LoRA adapter, which adds `scale * up @ down` to the weight of a layer (Hu et al. 2021).

    Attributes:
        down: [r, in], or [r, in, k, k] for a convolution.
        up: [out, r], or [out, r, 1, 1].
        scale: usually lora_alpha / r.
    """

    down: Stored
    up: Stored
    scale: float


@dataclass
class FolderTensors:
    """The tensors of a folder by their names in the model.

    Attributes:
        tensors: the location of each.
        adapters: their LoRA adapters, in order of training.
        shadowed: tensors of the safetensors files that a separate file overrides.
        separate: separate file -> name in the model -> name in the file, in the file's order.
        separate_adapters: separate file -> name in the file -> half of an adapter.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    adapters: dict[str, list[LowRank]] = field(default_factory=dict)
    shadowed: dict[str, Stored] = field(default_factory=dict)
    separate: dict[str, dict[str, str]] = field(default_factory=dict)
    separate_adapters: dict[str, dict[str, Stored]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor and merge its adapters in float32, rounded once at the end.

        Args:
            name: the tensor.
            dtype: of the result, if it is a floating-point tensor; None: as stored.
        """
        tensor = self.tensors[name].read()
        dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        for adapter in self.adapters.get(name, ()):
            tensor = merged_weight(tensor.float(), adapter.down.read(), adapter.up.read(), adapter.scale)
        return tensor.to(dtype)


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """`weight + scale * up @ down` (see `LowRank`), computed in float32 and returned in the dtype of `weight`."""
    matrices = (tensor.float().flatten(1) for tensor in (weight, up, down))
    return torch.addmm(*matrices, alpha=scale).view(weight.shape).to(weight.dtype)


def canonical_name(key: str) -> str:
    """A tensor's name in the model, from its name in a public file."""
    key = key.removeprefix("module.")  # left by a distributed wrapper
    while key.startswith(2 * VISION_PREFIX):  # the FiLM wrapper has the same name as the backbone inside it
        key = key.removeprefix(VISION_PREFIX)
    return _FILM_WRAPPER.sub(r"\1.", key)


def find_tensors(folder: Path) -> FolderTensors:
    """Locate the tensors of a checkpoint folder.

    Raises:
        ConfigError: no weights, or a file that is missing or unreadable.
    """
    tensors = FolderTensors()
    folders = lineage(folder)
    for path in weight_files(folders[-1]):
        for key, shape in safetensors_header(path):
            tensors.tensors[canonical_name(key)] = Stored(path, key, shape)
    separate = {
        prefix: find_one(folders, f"{module}--*_checkpoint.pt", f"files of {module}")
        for module, prefix in PARTS.items()
    }
    for place in reversed(folders):
        trained: dict[str, LowRank] = {}  # OFT stores adapters of the vision backbone in both files
        for prefix, file in separate.items():
            if file is not None and file.parent == place:
                trained |= _add_separate(tensors, file, prefix)
        adapter = adapter_folder(place)
        if adapter is not None:
            trained |= _adapters_of(tensors, adapter)
        for name, low_rank in trained.items():
            tensors.adapters.setdefault(name, []).append(low_rank)
    return tensors


def find_one(folders: Sequence[Path], pattern: str, title: str) -> Path | None:
    """The file of this pattern in the first folder that has any; ConfigError if that has several."""
    for folder in folders:
        paths = sorted(folder.glob(pattern))
        if len(paths) > 1:
            raise ConfigError(f"{folder} has several {title} {[p.name for p in paths]}; keep one")
        if paths:
            return paths[0]
    return None


def action_heads(folder: Path) -> list[Path]:
    """Files of regression or diffusion heads next to the weights."""
    return sorted(path for pattern in HEAD_PATTERNS for path in folder.glob(pattern))


def adapter_folder(folder: Path) -> Path | None:
    """Folder of the LoRA adapter of a folder without weights; None if there are weights, which take precedence."""
    if (folder / INDEX_FILE).is_file() or _single_files(folder):
        return None
    places = (folder, folder / ADAPTER_FOLDER)
    return next((place for place in places if (place / ADAPTER_CONFIG_FILE).is_file()), None)


def lineage(folder: Path) -> list[Path]:
    """The folder and its chain of base models; only the last has config, weights and tokenizer.

    Raises:
        ConfigError: a base model is not a local folder, or adapters name each other as base models.
    """
    folders = [folder]
    while (adapter := adapter_folder(folders[-1])) is not None:
        folders.append(_base_of(adapter, folders))
    return folders


def _base_of(adapter: Path, adapted: Sequence[Path]) -> Path:
    """The folder that an adapter names as its base model, which is not one of `adapted`."""
    config = read_json(adapter / ADAPTER_CONFIG_FILE)
    check_types(config, {"base_model_name_or_path": str | None}, adapter / ADAPTER_CONFIG_FILE)
    named = config.get("base_model_name_or_path") or ""
    visited = {adapter.resolve(), *(place.resolve() for place in adapted)}
    for place in (Path(named), adapter / named):
        if named and place.is_dir() and place.resolve() not in visited:
            admit(place, below=False)
            return place
    raise ConfigError(
        f"{adapter / ADAPTER_CONFIG_FILE}: the base model {named!r} is not a folder here; set "
        "base_model_name_or_path to the folder of the checkpoint the adapter was trained on"
    )


def find_file(folder: Path, name: str) -> Path:
    """Path of a small file in the folder or, if only that has it, in the base model; it may not exist."""
    path = folder / name
    if path.is_file() or not folder.is_dir():
        return path
    return next((place / name for place in lineage(folder) if (place / name).is_file()), path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: the shards listed in its index, or the single file.

    Raises:
        ConfigError: there are none, some are missing, or it is unclear which one to use.
    """
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        check_types(index, {"weight_map": dict[str, str]}, folder / INDEX_FILE)
        weight_map = index.get("weight_map", {})
        try:
            paths = [inside(folder, name) for name in sorted(set(weight_map.values()))]
        except ValueError as error:
            raise ConfigError.of(None, "invalid_file", f"{folder / INDEX_FILE}: {error}") from None
        absent = [path.name for path in paths if not path.is_file()]
        if absent or not paths:
            lost = sum(name in absent for name in weight_map.values())
            raise ConfigError(
                f"{folder}: {', '.join(absent) or 'every shard'} is missing, although {INDEX_FILE} names it "
                f"({lost} tensors); copy the checkpoint again"
            )
        return paths
    single = _single_files(folder)
    if len(single) == 1:
        return single
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    names = [p.name for p in single]
    raise ConfigError(f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} (safetensors found: {names})")


def _single_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.name not in NOT_THE_BODY)


def safetensors_header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in a file; raises ConfigError if it is unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                yield key, tuple(file.get_slice(key).get_shape())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error}); copy the checkpoint again") from error


def torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch file by name, memory-mapped if possible; no code in it is run.

    Raises:
        ConfigError: it is unreadable, names code, or contains anything else.
    """
    content = read_torch_file(path, mmap=True)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{path} does not hold tensors by name; copy the checkpoint again")
    return content


def _add_separate(tensors: FolderTensors, path: Path, prefix: str) -> dict[str, LowRank]:
    """Add the tensors of a separate file, which override the safetensors files; returns its LoRA adapters."""
    names, low_rank, adapters = {}, {}, {}
    for key, value in torch_file(path).items():
        plain = key.removeprefix("module.")
        name = canonical_name(plain if plain.startswith(prefix) else prefix + plain)
        stored = Stored(path, key, tuple(value.shape), value)
        if _ADAPTER_PART.search(name):
            low_rank[name.replace(".default.weight", ".weight")] = adapters[plain] = stored
            continue
        name = name.replace(BASE_LAYER, ".")
        if name in tensors.tensors:
            tensors.shadowed[name] = tensors.tensors[name]
        names[name] = plain
        tensors.tensors[name] = stored
        tensors.adapters.pop(name, None)
    tensors.separate[path.name] = names
    if adapters:
        tensors.separate_adapters[path.name] = adapters
    rank = min((s.shape[0] for n, s in low_rank.items() if n.endswith("lora_A.weight")), default=1)
    return _pair_adapters(tensors, low_rank, min(rank, OFT_MAX_LORA_ALPHA) / rank, path)


def _adapters_of(tensors: FolderTensors, folder: Path) -> dict[str, LowRank]:
    """LoRA adapters in peft's format."""
    config = read_json(folder / ADAPTER_CONFIG_FILE)
    check_types({"r": None, "lora_alpha": None} | config, _ADAPTER_SETTINGS, folder / ADAPTER_CONFIG_FILE)
    unsupported = [k for k in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        unsupported.append(f"peft_type {config.get('peft_type')} with bias {config.get('bias')}")
    if unsupported:
        raise ConfigError(
            f"{folder}: {', '.join(unsupported)} cannot be merged here; merge the adapter with peft first"
        )
    path, low_rank = folder / ADAPTER_WEIGHTS_FILE, {}
    for key, shape in safetensors_header(path):
        if BASE_LAYER in key:  # peft also stores the frozen weights of an adapted head
            continue
        name = canonical_name(key.removeprefix("base_model.model.")).replace(".default.weight", ".weight")
        low_rank[name] = Stored(path, key, shape)
    rank = config["r"]
    if not 0 < rank <= _LARGEST_RANK:
        raise ConfigError.of(
            None,
            "invalid_file",
            f"{folder / ADAPTER_CONFIG_FILE}: r, the rank of the adapters, must lie in 1..{_LARGEST_RANK}",
        )
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    return _pair_adapters(tensors, low_rank, scale, path)


def _pair_adapters(tensors: FolderTensors, low_rank: dict[str, Stored], scale: float, path: Path) -> dict[str, LowRank]:
    """Adapters by the name of the adapted weight."""
    adapters, problems = {}, []
    for name, down in low_rank.items():
        if not name.endswith(".lora_A.weight"):
            if name.replace("lora_B", "lora_A") not in low_rank or not name.endswith(".lora_B.weight"):
                problems.append(f"{path}: {name} does not belong to an adapter")
            continue
        stem = name.removesuffix("lora_A.weight")
        weight, up = tensors.tensors.get(f"{stem}weight"), low_rank.get(f"{stem}lora_B.weight")
        if weight is None or up is None or not _fit_together(weight.shape, down.shape, up.shape):
            shapes = [None if s is None else list(s.shape) for s in (weight, down, up)]
            problems.append(f"{path}: {stem} weight, lora_A, lora_B are {shapes}, which do not fit together")
            continue
        adapters[f"{stem}weight"] = LowRank(down, up, scale)
    if problems:
        raise ConfigError(problems)
    return adapters


def _fit_together(weight: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...]) -> bool:
    """Whether the shapes of a weight and its adapter are compatible, see `LowRank`."""
    if len(weight) < 2 or not down:
        return False
    return down[1:] == weight[1:] and up == (weight[0], down[0], *(1 for _ in weight[2:]))
