"""Several machines by host file: over ssh to this one where that works, and without ssh, started on each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlvla.models.actor import Actor
from rlvla.utils.files import read_metrics
from tests.support.launching import LAUNCHER, PPO_FLAGS, PPO_SCRIPT, ROOT, environment, free_port

pytestmark = pytest.mark.slow


def training(policy: Path, folder: Path) -> list[str]:
    return [PPO_SCRIPT, "--pretrain", str(policy), *PPO_FLAGS, "--num_episodes", "8", "--save_path", str(folder)]


def trained_on_two_ranks(folder: Path) -> None:
    (record,) = [r for r in read_metrics(folder) if "rollout/env_steps" in r]
    assert record["total/episodes"] == 8
    newest = folder / "checkpoints" / "iteration_000001"
    assert {path.name for path in newest.glob("rank*")} == {"rank0.pt", "rank1.pt"}
    Actor.from_pretrained(folder / "policy")


@pytest.mark.nightly
def test_started_on_each_machine_without_ssh(policy_folder: Path, tmp_path: Path) -> None:
    """Two names of this machine stand for two machines."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    shared = [LAUNCHER, "--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--master_addr", "127.0.0.1"]
    shared += ["--master_port", free_port()]
    processes = [
        subprocess.Popen(
            [*shared, "--node_rank", str(node), *training(policy_folder, tmp_path / "run")],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-2000:] for text in printed)
    assert sum(text.count("next: python cli/eval_vla.py") for text in printed) == 1
    trained_on_two_ranks(tmp_path / "run")


@pytest.mark.nightly
def test_two_tasks_of_a_slurm_job(policy_folder: Path, tmp_path: Path) -> None:
    """The commands of Slurm stand in: srun starts both tasks here, with the variables that it sets."""
    programs = {
        "srun": 'shift\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!); done\n'
        "for task in ${tasks[@]}; do wait $task || exit 1; done",
        "scontrol": "printf '127.0.0.1\\nnot_the_first\\n'",
        "activate": "",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "VENV": str(tmp_path), "MASTER_PORT": free_port()}
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "examples/scripts/slurm.sbatch", *training(policy_folder, tmp_path / "run")],
        cwd=ROOT,
        env={**environment(), **job, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    trained_on_two_ranks(tmp_path / "run")


def as_options(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("-o", setting)]


@pytest.fixture
def ssh_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The port of an ssh server of this test's own, on this machine, that pdsh enters with a key of this test's own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    missing = [name for name in ("ssh", "ssh-keygen", "pdsh") if shutil.which(name) is None] + ["sshd"] * (not server)
    if missing or server is None:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install openssh-server pdsh)")
    keys, port = tmp_path / "keys", free_port()
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    client = ["UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=no", "BatchMode=yes", "LogLevel=ERROR"]
    options = ["-i", str(keys / "user"), *as_options(client)]
    settings = [f"ListenAddress=127.0.0.1:{port}", f"HostKey={keys}/host", f"AuthorizedKeysFile={keys}/user.pub"]
    settings += ["StrictModes=no", "PidFile=none", "UsePAM=no", "PasswordAuthentication=no", "PermitRootLogin=yes"]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server that is root's separates its privileges
    command = [server, "-D", "-e", "-f", "/dev/null", *as_options(settings)]
    entering = ["ssh", "-p", port, *options, "127.0.0.1", "true"]
    log = tmp_path / "sshd.log"
    with log.open("w") as printed, subprocess.Popen(command, stdout=printed, stderr=printed) as process:
        try:
            for _ in range(100):
                if process.poll() is None and subprocess.run(entering, stdin=subprocess.DEVNULL).returncode == 0:
                    break
                time.sleep(0.2)
            else:
                pytest.skip(f"no way in over ssh: {log.read_text().strip()[-300:]}")
            monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", " ".join(options))
            yield port
        finally:
            process.terminate()


def test_over_ssh(policy_folder: Path, tmp_path: Path, ssh_port: str) -> None:
    """Started once; the launcher enters both "machines" over ssh."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    command = [LAUNCHER, "--hostfile", str(tmp_path / "hosts"), "--master_addr", "127.0.0.1", "--no_ssh_check"]
    command += ["--ssh_port", ssh_port, "--master_port", free_port(), *training(policy_folder, tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trained_on_two_ranks(tmp_path / "run")
    printed = done.stdout + done.stderr
    speaking = {line.split(":")[0] for line in printed.splitlines()}  # pdsh writes the machine before each line
    assert {"127.0.0.1", "localhost"} <= speaking
