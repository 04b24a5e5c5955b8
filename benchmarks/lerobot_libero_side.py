"""LeRobot's half of `lerobot_libero.py`: runs in another environment, which has `lerobot` and LIBERO, not rlvla.

`play ASSETS REQUEST OUTPUT`: in the folder of a policy, play one episode with LeRobot's environment, pipelines, policy
and loop, and record observation and action of each step. `evaluate ASSETS FLAG ...`: `lerobot-eval` with these flags.
ASSETS is the folder with LIBERO's meshes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def find_libero(assets: str) -> None:
    """Write LIBERO's configuration of its folders, which it would ask for on the terminal."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this environment has no LIBERO: pip install --no-deps hf-libero==0.1.4")
    package = Path(next(iter(spec.submodule_search_locations))) / "libero"
    folders = {"benchmark_root": package, "bddl_files": package / "bddl_files", "init_states": package / "init_files"}
    folders |= {"datasets": package.parent / "datasets", "assets": Path(assets)}
    settings = Path(tempfile.mkdtemp(prefix="lerobot-libero-")) / "config.yaml"
    settings.write_text("".join(f"{name}: {folder}\n" for name, folder in folders.items()))
    os.environ["LIBERO_CONFIG_PATH"] = str(settings.parent)
    import libero.libero

    libero.libero._assets_path_cache = assets


def play(request: str, output: str) -> None:
    """Record an episode: images by feature [S, H, W, 3], state [S, P], actions [S, D], success [S], noise, task."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.configs import LiberoEnv
    from lerobot.envs.factory import make_env, make_env_pre_post_processors
    from lerobot.policies.factory import make_policy, make_pre_post_processors
    from lerobot.scripts.lerobot_eval import rollout

    settings = json.loads(Path(request).read_text())
    config = PreTrainedConfig.from_pretrained(".")
    config.pretrained_path, config.device = Path("."), "cpu"
    env_config = LiberoEnv(task=settings["suite"], task_ids=[settings["task_id"]], episode_length=settings["steps"])
    env = make_env(env_config, n_envs=1)[settings["suite"]][settings["task_id"]]
    env.envs[0].init_state_id = settings["init_state_id"]
    names = settings["rename_map"]
    policy = make_policy(cfg=config, env_cfg=env_config, rename_map=names).eval()
    overrides = {"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": names}}
    before, after = make_pre_post_processors(config, pretrained_path=".", preprocessor_overrides=overrides)
    env_before, env_after = make_env_pre_post_processors(env_cfg=env_config, policy_cfg=config)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    tasks: list[str] = []

    def observe(batch: dict[str, Any]) -> dict[str, Any]:
        """LIBERO's part of the preprocessing; its input and its state are recorded."""
        for key in [key for key in batch if key.startswith("observation.images.")]:
            seen[names.get(key, key)].append((batch[key] * 255).round().to(torch.uint8).movedim(1, -1))
        done = env_before(batch)
        seen["state"].append(done["observation.state"])
        tasks.extend(batch["task"])
        return done

    draw = policy.model.sample_noise

    def drawn(*args: Any) -> Tensor:
        noise = draw(*args)
        seen["noise"].append(noise)
        return noise

    policy.model.sample_noise = drawn
    torch.manual_seed(settings["seed"])
    played = rollout(env, policy, observe, env_after, before, after, seeds=[settings["seed"]])
    record = {name: torch.cat(values).numpy() for name, values in seen.items()}
    record |= {"actions": played["action"][0].numpy(), "success": played["success"][0].numpy()}
    np.savez(output, task=np.array(tasks[0]), n_action_steps=config.n_action_steps, **record)
    env.close()


if __name__ == "__main__":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # robosuite takes "" for the number of a device to draw on
    find_libero(sys.argv[2])
    if sys.argv[1] == "play":
        play(*sys.argv[3:])
    else:
        from lerobot.scripts.lerobot_eval import main

        sys.argv[1:] = sys.argv[3:]
        main()
