import subprocess
import sys

PROBE = """
import sys
import rlvla.algorithms, rlvla.algorithms.balancing, rlvla.algorithms.filtering, rlvla.algorithms.kl
import rlvla.algorithms.rollout_correction, rlvla.algorithms.value_normalization
rooms = {name.split('.')[1] for name in sys.modules if name.startswith('rlvla.')}
others = rooms - {'algorithms', 'options', 'version'}
heavy = {'transformers', 'deepspeed', 'robosuite', 'mujoco', 'tensorboard'} & set(sys.modules)
sys.exit(f'{others} {heavy}' if others or heavy else 0)
"""


def test_the_room_imports_nothing_but_torch_and_numpy():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
