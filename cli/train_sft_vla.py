"""Supervised fine-tuning of a VLA policy on demonstrations.

Launch: deepspeed --num_accelerators 2 cli/train_sft_vla.py --demos runs/demos/demos.hdf5 --save_path runs/sft
or without a launcher: python cli/train_sft_vla.py ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.threads import limit_threads

limit_threads()

from rlvla.models.actor import ActorConfig
from rlvla.models.vla.configuration_openvla import MODEL_VARIANTS
from rlvla.models.vla.platforms import PLATFORMS
from rlvla.trainer.custom_modules import CustomConfig, parse_command_line
from rlvla.trainer.setup import PLATFORM_HELP, VARIANT_HELP
from rlvla.trainer.sft_trainer import SFTConfig
from rlvla.utils.arguments import Parser, add_arguments, arg, fail, from_namespace
from rlvla.utils.commands import command
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.strategy import StrategyConfig


@dataclass(frozen=True)
class RunConfig:
    """What is trained on what."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "demonstrations, one or more of: HDF5 of cli/collect_demos.py or dumped rollouts, a LeRobot folder, LIBERO's "
        "*_demo.hdf5 (one or a folder)",
        metavar="PATH",
    )
    pretrain: str = arg("tiny", "checkpoint folder to start from, or 'tiny' for a new small model", metavar="DIR")
    save_path: str = arg("runs/sft", "run folder; the policy goes to its subfolder policy/", metavar="DIR")
    cameras: tuple[str, ...] = arg((), "cameras of the file to use (default: all of them)", metavar="NAME")
    use_proprio: bool = arg(True, "a new tiny model reads proprio where the demonstrations hold it")
    center_crop: bool | None = arg(None, "crop images to 90 % of their area (default: the checkpoint's, else no)")
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")
    model_variant: str | None = arg(None, f"{VARIANT_HELP} (a new tiny model: oft)", choices=MODEL_VARIANTS)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS))
    seed: int = arg(0, "seed of weights and batches", minimum=0)
    dry_run: bool = arg(
        False, "check the configuration, print the step arithmetic and the memory per rank, and stop: starts nothing"
    )


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a new tiny model (--pretrain tiny)."""

    action_chunk_len: int | None = arg(
        None, "actions per decision (default: the checkpoint's, else 8, or 1 for autoregressive)", minimum=1
    )
    tiny_patch_size: int = arg(8, "side of a patch in pixels", minimum=1)
    tiny_vision_dim: int = arg(48, "width of each vision tower", minimum=4)
    tiny_vision_depth: int = arg(3, "blocks of each vision tower (the last one is not computed)", minimum=2)
    tiny_llm_dim: int = arg(64, "width of the decoder", minimum=4)
    tiny_llm_layers: int = arg(3, "layers of the decoder", minimum=1)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, RunConfig, "what is trained")
    add_arguments(parser, TinyConfig, "new tiny model")
    add_arguments(parser, SFTConfig, "training")
    add_arguments(parser, ActorConfig, "adapters and memory")
    add_arguments(parser, StrategyConfig, "DeepSpeed")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser, namespace = parse_command_line(build_parser, argv)
    kinds = (RunConfig, TinyConfig, SFTConfig, ActorConfig, StrategyConfig, CustomConfig)
    parts = [from_namespace(kind, namespace) for kind in kinds]
    from rlvla.trainer.sft_run import run_sft

    try:
        run_sft(*parts)
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)


if __name__ == "__main__":
    main()
