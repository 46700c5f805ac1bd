"""Runs deploy/ray_serve.py on a Ray of its own until it is told to stop, and tells how many engines
there are: PORT [NAME=VALUE ...]."""

from __future__ import annotations

import sys
import time

import ray
from ray import serve

from deploy.ray_serve import application


def start_ray(tries: int = 4) -> None:
    """Its own processes get 30 seconds to start, which a busy machine does not always give."""
    try:
        # As many processors as its parts ask for, be they there or not, and little memory.
        ray.init(num_cpus=8, object_store_memory=80 * 2**20, include_dashboard=False)
    except Exception as error:
        if "timed out during startup" not in str(error) or tries == 1:
            raise
        start_ray(tries - 1)


def main() -> None:
    port, *words = sys.argv[1:]
    start_ray()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(application(dict(word.split("=", 1) for word in words)), name="loomserve")
    print(f"loomserve is ready on http://127.0.0.1:{port}", flush=True)
    told = 0
    while True:
        engines = serve.status().applications["loomserve"].deployments["Engine"]
        if (running := engines.replica_states.get("RUNNING", 0)) != told:
            print(f"engines that run: {running}", flush=True)
            told = running
        time.sleep(0.2)  # Ray tells nobody that a replica has started or gone


if __name__ == "__main__":
    main()
