"""Pictures per second on the page of `cli/teleoperate.py`, while a key is held that steps without moving.

Example:
  python cli/teleoperate.py robosuite --image_size 256 --max_steps 1000 --output runs/speed
  python benchmarks/teleoperation.py 'http://127.0.0.1:8010/?token=...'
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request

from websockets.sync.client import connect

_AGAIN_SECONDS = 0.2  # between messages of the page while a key is held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="address that the command shows, in quotes")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    origin = options.address.partition("/?")[0]
    page = urllib.request.urlopen(options.address).read().decode()
    key = page.partition("/socket?key=")[2].partition("`")[0]
    with connect(f"ws{origin[4:]}/socket?key={key}", origin=origin, proxy=None) as socket:
        count, size, state = 0, 0, {}
        begin = sent = time.perf_counter()
        while (now := time.perf_counter()) < begin + options.seconds:
            if now >= sent:
                socket.send(json.dumps({"type": "controls", "held": {".": 1}}))
                sent = now + _AGAIN_SECONDS
            message = socket.recv()
            if isinstance(message, str):
                state = json.loads(message)
            elif message[0] == 0:
                count, size = count + 1, size + len(message)
    rate = count / options.seconds
    print(
        f"{rate:.1f} pictures/s of each camera, {size / max(count, 1) / 1e3:.1f} kB each, after {state['step']} steps"
    )


if __name__ == "__main__":
    main()
