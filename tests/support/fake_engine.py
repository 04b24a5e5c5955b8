"""Stands in for `rlvla/rollout/vllm/engine.py` where a fault is wanted: python fake_engine.py FDS... SETTINGS."""

import json
import subprocess
import sys
import time
from multiprocessing.connection import Connection

connection, settings = Connection(int(sys.argv[1])), json.loads(sys.argv[4])


def send(message: object) -> None:
    connection.send_bytes(json.dumps(message).encode())


print("this is the log", flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # in no group that is killed
if settings["fault"] == "start":
    sys.exit("no such head width")
if settings["fault"] == "error at start":
    send({"error": "Traceback: no such head width"})
    time.sleep(600)
if settings["fault"] != "slow start":
    send({"ready": True, "child": child.pid})
while True:
    try:
        message = json.loads(connection.recv_bytes())
    except EOFError:
        break
    if message["do"] == "die":
        sys.exit(7)
    if message["do"] == "hang":
        time.sleep(600)
    if message["do"] == "wait":
        time.sleep(5)
    failed = {"error": "Traceback: in the program"} if message["do"] == "fail" else {}
    send({"id": message["id"], "child": child.pid, "done": message["do"], **failed})
