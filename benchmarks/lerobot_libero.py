"""Does a policy act in LeRobot's LIBERO as it does here? LeRobot plays an episode, which is then repeated.

    python benchmarks/lerobot_libero.py --lerobot_python ../lerobot-env/bin/python --pretrain runs/libero_grpo/policy
    python benchmarks/lerobot_libero.py --lerobot_python ../lerobot-env/bin/python --pretrain runs/smolvla/policy \
        --task_suite_name libero_object --episodes 5 --eval_tasks 0 1 2 3 4 5 6 7 8 9 --eval_steps 280

The environment of `lerobot_agreement.py` needs LIBERO, too, in the versions of constraints.txt: `pip install --no-deps
hf-libero bddl robosuite mujoco`, and their imports (numba, easydict, future, pyopengl, glfw, matplotlib). Meshes are
searched as in every command. LeRobot plays with its own environment, pipelines, policy and loop; observations, noise
and actions are recorded. Compared are:

    images, state      of this program's environment, which repeats the actions, at every step
    actions            that greedy evaluation here chooses from LeRobot's observations and noise
    instruction, success

Then `lerobot-eval` plays `--episodes` (0: none) of each of `--eval_tasks`, from the first initial states, and reports
its success rate; it always renders images of 256 pixels. The command fails if an action differs by more than rounding,
or if the simulations differ: LeRobot takes the orientation from the controller and not from the observation, and its
simulation drifts from the one here by some 1e-4 a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lerobot_agreement import TOLERANCE, lerobot
from rlvla.envs import make_env
from rlvla.envs.libero.env import IMAGE_SIZE, LiberoOptions
from rlvla.envs.libero.install import find_assets
from rlvla.models.families import check_checkpoint
from rlvla.models.lerobot.policy import LeRobotPolicy
from rlvla.utils.terminal import table

# Mean of an image, in units of a pixel's 255, and largest of the state.
ALIKE = {"image": 3.0, "state": 3e-3}
SIDE = Path(__file__).resolve().parent / "lerobot_libero_side.py"
_LEROBOT_NAMES = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}


def actions_here(policy: Any, played: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [S, D] that the policy chooses from LeRobot's observations and noise."""
    chunk, noise = policy.spec.action_chunk_len, played["noise"].reshape(len(played["noise"]), -1)
    seen = [played[policy.settings.camera_map[camera]][::chunk] for camera in policy.settings.cameras]
    images, state = policy.prepare(np.stack(seen, axis=1), played["state"][::chunk])
    drawn = np.zeros((len(noise), *policy.spec.noise_shape), np.float32)
    drawn[:, : noise.shape[1]] = noise  # greedy decisions read no more
    decision = policy.act(images, state, [str(played["task"])] * len(noise), noise=drawn, greedy=True)
    return decision.actions.reshape(-1, decision.actions.shape[-1])[: len(played["actions"])]


def repeated(policy: Any, played: dict[str, np.ndarray], request: dict[str, Any]) -> dict[str, Any]:
    """Observations and success of this program's environment when the actions are repeated, named as in the record."""
    options = {"cameras": policy.settings.cameras, "image_size": IMAGE_SIZE, "render_quality": "full"}
    env = make_env(request["suite"], request["task_id"], max_steps=request["steps"], use_proprio=True, **options)
    observation, shown, success = env.reset(request["init_state_id"], 0), [], []
    instruction = observation.instruction
    for action in played["actions"]:
        shown.append(observation)
        result = env.step_chunk(action[None])
        observation = result.observation
        success.append(bool(result.successes[0]))
    env.close()
    images = np.stack([each.images for each in shown])
    record = {policy.settings.camera_map[name]: images[:, i] for i, name in enumerate(policy.settings.cameras)}
    state = np.stack([each.proprio for each in shown])
    return {**record, "state": state, "success": np.array(success), "task": instruction}


def compared(policy: Any, played: dict[str, np.ndarray], request: dict[str, Any]) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether both agree."""
    here = repeated(policy, played, request)
    cameras = list(policy.settings.camera_map.values())
    gaps = {name: np.abs(here[name].astype(float) - played[name]) for name in [*cameras, "state"]}
    gaps["actions"] = np.abs(actions_here(policy, played) - played["actions"])
    rows = [
        [f"{name}, mean, of 255", f"{gap.mean():.2f}"] if name in cameras else [name, f"{gap.max():.1e}"]
        for name, gap in gaps.items()
    ]
    same = {"instruction": here["task"] == str(played["task"])}
    same["success"] = np.array_equal(here["success"], played["success"])
    same["steps of a decision"] = policy.spec.action_chunk_len == played["n_action_steps"]
    rows += [[name, "the same" if value else "differs"] for name, value in same.items()]
    near = gaps["actions"].max() <= TOLERANCE and gaps["state"].max() <= ALIKE["state"]
    near &= all(gaps[name].mean() <= ALIKE["image"] for name in cameras)
    return rows, bool(near) and all(same.values())


def rename_map(policy: LeRobotPolicy) -> dict[str, str]:
    """LeRobot's names of the cameras -> image features of the policy, where they differ."""
    names = {_LEROBOT_NAMES[camera]: feature for camera, feature in policy.settings.camera_map.items()}
    return {name: feature for name, feature in names.items() if name != feature}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot_python", required=True, help="interpreter of the environment that has lerobot")
    parser.add_argument("--pretrain", required=True, help="folder of the policy; its cameras are mapped")
    parser.add_argument("--task_suite_name", default="libero_spatial")
    parser.add_argument("--task_id", type=int, default=0)
    parser.add_argument("--init_state_id", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="at most, of each episode")
    parser.add_argument("--episodes", type=int, default=1, help="of lerobot-eval, per task")
    parser.add_argument("--eval_tasks", type=int, nargs="+", help="of lerobot-eval (default: --task_id)")
    parser.add_argument("--eval_steps", type=int, help="step limit of lerobot-eval (default: --steps)")
    parser.add_argument("--libero_assets", help=LiberoOptions.__dataclass_fields__["libero_assets"].metadata["help"])
    options = parser.parse_args()
    python, assets = str(Path(options.lerobot_python).absolute()), find_assets(options.libero_assets)
    request = {"suite": options.task_suite_name, "seed": 0}
    request |= {name: getattr(options, name) for name in ("task_id", "init_state_id", "steps")}
    # LeRobot cannot start from zero noise; both follow the noise that it draws.
    checkpoint: Any = check_checkpoint(options.pretrain, None, overrides={"flow_eval_noise": "sample"})
    network = checkpoint.files.load_network(shifted_positions=True)  # as in the transformers of LeRobot 0.4.4
    policy = LeRobotPolicy(checkpoint.files, checkpoint.settings, network=network).eval()
    request["rename_map"] = rename_map(policy)
    with tempfile.TemporaryDirectory() as scratch:
        request_file, output = Path(scratch) / "request.json", Path(scratch) / "played.npz"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        lerobot(python, "play", assets, request_file, output, side=SIDE, folder=options.pretrain)
        rows, agree = compared(policy, dict(np.load(output)), request)
        print(table(["", "largest difference"], rows))
        if options.episodes:
            flags = ["--policy.path=.", "--policy.device=cpu", "--env.type=libero", f"--env.task={request['suite']}"]
            flags += [f"--env.task_ids={options.eval_tasks or [options.task_id]}"]
            flags += [f"--env.episode_length={options.eval_steps or options.steps}"]
            flags += [f"--eval.n_episodes={options.episodes}", "--eval.batch_size=1", f"--output_dir={scratch}/eval"]
            flags += [f"--rename_map={json.dumps(request['rename_map'])}"]
            lerobot(python, "evaluate", assets, *flags, side=SIDE, folder=options.pretrain)
            summary = json.loads((Path(scratch) / "eval" / "eval_info.json").read_text(encoding="utf-8"))["overall"]
            print(f"lerobot-eval: {summary['n_episodes']} episodes, {summary['pc_success']:.0f} % successful")
    if not agree:
        raise SystemExit("LeRobot and this program differ")


if __name__ == "__main__":
    main()
