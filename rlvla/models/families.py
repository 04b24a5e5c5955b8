"""Policy families, registered under the `model_type` (or `type`) in a checkpoint's config.json.

A family checks checkpoint folders and gives the spec of their policies, the loaded networks, and sequence lengths.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlvla.models.flow.settings import ASKED_SCORES, FLOW_SETTINGS
from rlvla.utils.budgets import memory_bytes, over_memory
from rlvla.utils.cli.flags import is_set, no_effect
from rlvla.utils.data_files import admit, check_types, read_json
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import no_policy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlvla.experience import Experience
    from rlvla.models.config import ActorConfig
    from rlvla.models.policy import Policy, PolicySpec

CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "rlvla_environment.json"
TEXT_CONDITION: Mapping[str, Any] = MappingProxyType({})  # `PolicyFamily.condition` of families that read text
GUIDANCE = "guidance"  # in that file, and among the overrides of `check_checkpoint`
ADAPTER_CONFIG_FILE = "adapter_config.json"
_FLOAT32 = 4  # bytes
_MARGIN = 32  # between the largest tensor of a decision and all of it
# Command-line settings for public checkpoints (`PolicyConfig`); a family need not support them.
SETTINGS = (
    "center_crop",
    "model_variant",
    "platform",
    "action_std",
    "action_std_init",
    "action_noise_correlation",
    *FLOW_SETTINGS,
    "camera_map",
    "critic_features",
)


@dataclass(frozen=True)
class RowShape:
    """Size of one decision: images per observation and prompt tokens."""

    num_images: int
    prompt_tokens: int


class Sketch(Protocol):
    """A network for estimating memory: its tensors have shapes but no storage."""

    @property
    def module(self) -> nn.Module:
        """The network."""
        ...

    def loss(self, rows: int) -> Tensor:
        """The scalar that the trainer backpropagates for this many decisions."""
        ...

    def decide(self, rows: int) -> None:
        """Choose actions for this many observations, as in a rollout."""
        ...


class Checkpoint:
    """A checkpoint folder whose files have been checked but whose weights have not been read.

    By default there are no adapters, and critic and reward model only with `PolicySpec.feature_dim`.

    Attributes:
        folder: its path.
        spec: spec of its policy.
        unnorm_key: the entry of its dataset statistics in use; "" if it has none.
        unread_options: names of the flags of `ActorConfig` that have no effect on its networks.
        guidance: weight of the condition of an advantage-conditioned policy when it acts; None: it has none.
    """

    folder: Path
    spec: PolicySpec
    unnorm_key: str
    unread_options: ClassVar[tuple[str, ...]] = ("train_expert_only",)
    guidance: float | None = None

    @property
    def largest_activation(self) -> int:
        """Elements of the largest tensor of a decision for one observation, at least; 0: not known.

        Where it comes near the memory of the machine, `sketch` is measured instead.
        """
        return 0

    def load_policy(self, config: ActorConfig | None = None, *, value_head: bool = False) -> Policy:
        """The policy with its weights, on the host.

        Args:
            config: adapters and memory options.
            value_head: add a value head to the network, read by `Policy.score_values`.
        """
        raise NotImplementedError

    def load_critic(self, config: ActorConfig | None = None) -> Any:
        """A critic initialized from these weights, see `rlvla.models.Critic` for its interface.

        By default a head on `Policy.features`; ConfigError for a policy without features.
        """
        from rlvla.models.value_models import load_feature_critic

        if not self.spec.feature_dim:
            text = f"{type_of(self.folder)} policies have no critic; choose an estimator without"
            raise ConfigError(f"{self.folder}: {text}")
        return load_feature_critic(self.load_policy(config), self.folder)

    def load_reward_model(self, config: ActorConfig | None = None, *, new: bool = False) -> Any:
        """The reward model in this folder, or a `new` one initialized from a policy; by default as for a critic."""
        from rlvla.models.value_models import load_feature_reward_model

        if not self.spec.feature_dim:
            raise ConfigError(f"{self.folder}: {type_of(self.folder)} policies have no reward model")
        return load_feature_reward_model(self.load_policy(config), self.folder, new=new)

    def load_return_model(self, *, new: bool = False, action_values: bool = False) -> Any:
        """The return model in this folder, or a `new` one initialized from a policy; by default as for a critic.

        `action_values`: of implicit Q-learning, see `rlvla.models.value_models.ActionValuePredictor`.
        """
        from rlvla.models.value_models import load_feature_return_model

        if not self.spec.feature_dim:
            raise ConfigError(f"{self.folder}: {type_of(self.folder)} policies have no return model")
        return load_feature_return_model(self.load_policy(), self.folder, new=new, action_values=action_values)

    def facts(self) -> dict[str, Any]:
        """Facts for a description of the folder besides the spec, title -> value."""
        return {}

    def preparation_differences(self, other: Checkpoint) -> list[str]:
        """Settings in which the two prepare observations differently; the networks of a run share prepared ones."""
        return []

    def option_problems(self, config: ActorConfig) -> list[Problem]:
        """Options of the run that these networks do not support."""
        if not config.lora_rank:
            return []
        text = f"--lora_rank {config.lora_rank}: {type_of(self.folder)} policies have no adapters; leave it out"
        return [Problem("lora_rank", "mismatch", text)]

    def check_decisions(self, policy: Policy, batch: Experience) -> None:
        """Raise ConfigError if decisions on real observations show that the policy cannot be trained."""

    def refitted(self, target: Path | None, facts: Any) -> list[Problem]:
        """Write a policy with the same weights for other cameras, states and actions.

        Args:
            target: the folder to write; None: only check. Nothing is written if there are problems.
            facts: the cameras, states and actions, see `rlvla.models.lerobot.new.NewPolicyFacts`.

        Returns:
            Reasons why the weights cannot be used.
        """
        text = f"--fit_to_demos: {type_of(self.folder)} policies are made for their cameras, states and actions"
        return [Problem("fit_to_demos", "mismatch", f"{text}; leave it out")]

    def begin_supervised(self, policy: Policy, *, mean_alone: bool) -> None:
        """Prepare the policy for supervised fine-tuning on demonstrations.

        Args:
            policy: from `load_policy`.
            mean_alone: the loss trains only the mean of continuous actions, not their standard deviation.
        """

    def row_shape(self, instructions: Sequence[str], num_images: int) -> RowShape:
        """Size of the longest decision."""
        return RowShape(num_images, 0)

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Like `Policy.row_tokens`, without loading weights."""
        return [1] * len(instructions)

    def sketch(
        self, row: RowShape, config: ActorConfig, *, scalar_head: bool = False, supervised: bool = False
    ) -> Callable[[], Sketch] | None:
        """Factory of a sketch of the policy; None if its memory cannot be estimated.

        Args:
            row: size of a decision.
            config: adapters and memory options.
            scalar_head: a critic or reward model instead.
            supervised: the policy is trained on demonstrations, too.
        """
        return None


class PolicyFamily:
    """Operations on a checkpoint folder before its network is loaded.

    Attributes:
        condition: overrides of `check` that give a policy the condition of advantage-conditioned training, which is
            part of its instructions; None: its policies do not support it. `Checkpoint.load_policy` sets
            `NetworkPolicy.guidance`.
    """

    condition: ClassVar[Mapping[str, Any] | None] = None

    def check(
        self, folder: Path, *, unnorm_key: str | None, suite: str | None, overrides: Mapping[str, Any]
    ) -> Checkpoint:
        """Check every file of a folder without reading its weights.

        Args:
            folder: the checkpoint.
            unnorm_key: requested entry of the statistics.
            suite: used in its place if there are several entries.
            overrides: the result of `overrides`.

        Raises:
            ConfigError: lists everything that is missing or inconsistent.
        """
        raise NotImplementedError

    def overrides(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Command-line settings that override config.json.

        Args:
            folder: the checkpoint.
            settings: values by name: `SETTINGS`, `action_chunk_len`, `cameras` of the environment, and `ASKED_SCORES`,
                the `PolicySpec.scores` that the run needs.

        Raises:
            ConfigError: a setting that this family does not support.
        """
        unsupported = [name for name in SETTINGS if settings.get(name) not in (None, ())]
        if unsupported:
            names = ", ".join(f"--{name}" for name in unsupported)
            raise ConfigError(f"{folder}: {names} means nothing for {type_of(folder)} policies; leave it out")
        return {}

    def reinforced(self, config: ActorConfig) -> ActorConfig:
        """Options for reinforcement learning; supervised training uses them unchanged."""
        return config

    def warnings(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Reasons why RL cannot start from a loadable folder; `checkpoint` is None if it failed its check."""
        return []


# Type in config.json -> module that registers it, imported on first use.
_HOMES = {
    "openvla": "rlvla.models.vla.family",
    "compact": "rlvla.models.compact.family",
    "smolvla": "rlvla.models.smolvla.family",
    "pi0": "rlvla.models.pi0.family",
    "pi05": "rlvla.models.pi0.family",
    "soft_actor": "rlvla.models.soft_actor.family",
    "dsrl": "rlvla.models.dsrl.family",
}
_families: dict[str, PolicyFamily] = {}


def register_policy_family(name: str, family: PolicyFamily) -> None:
    """Register a family under the `model_type` of its checkpoints; loading a module again replaces its family.

    Raises:
        ValueError: the name is empty or taken by another family.
    """
    if not name:
        raise ValueError("a policy family needs a non-empty name")
    origin = _origin(_families[name]) if name in _families else None
    shipped = name in _HOMES and type(family).__module__ != _HOMES[name]
    if shipped or origin not in (None, _origin(family)):
        raise ValueError(f"policy family {name!r} is taken; choose another model_type")
    _families[name] = family


def policy_families() -> list[str]:
    """The registered names, sorted."""
    return sorted({*_HOMES, *_families})


def family_of(folder: str | Path) -> PolicyFamily:
    """The family of a checkpoint folder.

    Raises:
        ConfigError: the folder or its config.json is missing or unreadable, names an unregistered type, or holds links
            that leave it.
    """
    name = type_of(folder)
    if name in _HOMES and name not in _families:
        importlib.import_module(_HOMES[name])
    if name not in _families:
        raise ConfigError(
            f"{Path(folder) / CONFIG_FILE}: model_type is {name!r}; known are {', '.join(policy_families())}. Load a "
            "custom family with --custom_module"
        )
    return _families[name]


def check_checkpoint(
    folder: str | Path,
    unnorm_key: str | None = None,
    suite: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Check a folder of any family without reading its weights; arguments and errors as in `PolicyFamily.check`.

    `overrides` may hold `GUIDANCE`, in place of the recorded weight.
    """
    folder = Path(folder)
    family, overrides = family_of(folder), dict(overrides or {})
    weight, recorded = overrides.pop(GUIDANCE, None), recorded_guidance(folder)
    if weight is not None and recorded is None:
        text = f"--guidance {weight:g}: {folder} was not trained with --advantage_conditioning; leave it out"
        raise ConfigError.of(GUIDANCE, "mismatch", text)
    check_weight_files(folder)
    checkpoint = family.check(folder, unnorm_key=unnorm_key, suite=suite, overrides=overrides)
    checkpoint.guidance = recorded if weight is None else weight
    check_memory(checkpoint)
    return checkpoint


def recorded_guidance(folder: str | Path) -> float | None:
    """The recorded weight of the condition of an advantage-conditioned policy; None for other policies.

    Raises:
        ConfigError: the record cannot be read.
    """
    path = Path(folder) / ENVIRONMENT_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    check_types(content, {GUIDANCE: float | None}, path)
    return content.get(GUIDANCE)


def check_weight_files(folder: Path) -> None:
    """ConfigError if the weights in a folder exceed the memory of the machine; of several formats one is read."""
    for suffix in (".safetensors", ".bin", ".pt"):
        problem = over_memory(sum(path.stat().st_size for path in folder.glob(f"*{suffix}")))
        if problem:
            raise ConfigError.of(None, "too_large", f"{folder}: the weights in *{suffix} {problem}")


def check_memory(checkpoint: Checkpoint) -> None:
    """ConfigError if a decision of a policy takes more memory than the machine has, from its sizes alone.

    Only sizes that come near it are measured, on fake tensors.
    """
    size = _FLOAT32 * checkpoint.largest_activation
    if size * _MARGIN <= memory_bytes():
        return
    problem = over_memory(size)
    if problem is None:
        from rlvla.models.config import ActorConfig
        from rlvla.models.footprint import decision_bytes

        row = checkpoint.row_shape(["act"], checkpoint.spec.cameras or 1)
        sketch = checkpoint.sketch(row, ActorConfig())
        if sketch is not None:
            try:
                problem = over_memory(decision_bytes(sketch))
            except RuntimeError:
                problem = "takes more numbers than can be counted; use another copy"
    if problem:
        text = f"{checkpoint.folder / CONFIG_FILE}: a decision for one observation {problem}"
        raise ConfigError.of(None, "too_large", text)


def checkpoint_overrides(
    folder: str | Path, settings: Any, cameras: Sequence[str] = (), scores: str | None = None
) -> dict[str, Any]:
    """Command-line settings that override config.json, see `PolicyFamily.overrides`.

    Args:
        folder: the checkpoint.
        settings: an object with (some of) the fields of `PolicyConfig`.
        cameras: of the environment, in its order; (): unknown.
        scores: the `PolicySpec.scores` that the run needs; None: any.

    Raises:
        ConfigError: as in `family_of`, or a setting that this family does not support.
    """
    values = {name: getattr(settings, name, None) for name in (*SETTINGS, "action_chunk_len")}
    values["cameras"] = tuple(cameras)
    values[ASKED_SCORES] = None if scores == "log_probs" else scores  # the default
    overrides, weight = family_of(folder).overrides(Path(folder), values), getattr(settings, GUIDANCE, None)
    return overrides if weight is None else {**overrides, GUIDANCE: weight}


def checkpoint_option_problems(
    checkpoint: Checkpoint, config: ActorConfig, given: Collection[str] = ()
) -> list[Problem]:
    """Options of the run that the networks of a checkpoint do not support or read."""
    unread = unread_option_problems(checkpoint.unread_options, type_of(checkpoint.folder), config, given)
    return [*checkpoint.option_problems(config), *unread]


def unread_option_problems(
    unread: Collection[str], kind: str, config: ActorConfig, given: Collection[str] = ()
) -> list[Problem]:
    """Flags that have no effect on a kind of policy.

    Args:
        unread: their names, see `Checkpoint.unread_options`.
        kind: the kind, for messages.
        config: the flags.
        given: names of the flags on the command line, which count as set even at their default value.
    """
    return [
        no_effect(field.name, getattr(config, field.name), f"it has no effect on {kind} policies")
        for field in fields(config)
        if field.name in unread and is_set(field, getattr(config, field.name), given)
    ]


def start_warnings(folder: str | Path, checkpoint: Checkpoint | None) -> list[str]:
    """See `PolicyFamily.warnings`; empty for a folder of an unknown family, which is an error elsewhere."""
    try:
        family = family_of(folder)
    except ConfigError:
        return []
    return family.warnings(Path(folder), checkpoint)


def type_of(folder: str | Path) -> str:
    """The type named in a folder's config.json, whose files are checked first (`admit`); errors as in `family_of`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(no_policy(folder))
    path = folder / CONFIG_FILE
    adapter = any((place / ADAPTER_CONFIG_FILE).is_file() for place in (folder, *folder.glob("*/")))
    if path.is_file() or adapter:
        admit(folder)
    if not path.is_file() and adapter:
        return "openvla"  # only an adapter: config.json is in its base model
    raw = read_json(path, allow_nan=True)
    return str(raw.get("model_type", raw.get("type")))


def _origin(family: PolicyFamily) -> tuple[str, str]:
    """Source file and class, since a file both imported and loaded by path becomes two modules."""
    return inspect.getfile(type(family).check), type(family).__qualname__
