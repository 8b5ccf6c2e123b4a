"""`slipstream deploy CONFIG.yaml`: serves a target with many replicas behind one address, on a Ray cluster.

    slipstream deploy fleet.yaml                      # starts a cluster on this machine, and serves until Ctrl-C
    slipstream deploy fleet.yaml --draft runs/new     # the same command elsewhere updates what runs, without a pause

The options are those of `serve`, and numbers of replicas. See docs/operations.md.
"""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.serve.fleet.options import DeployConfig

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

# Read when Ray is imported, here and in its processes. HAProxy hands requests to ingresses; Serve's own proxy, in
# Python, takes milliseconds for each piece of an answer.
SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # until every HAProxy knows that an ingress ends
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
LOOK_SECONDS = 1.0  # between looks at the application
LOST_LOOKS = 5  # after which the cluster counts as lost
ANSWER_SECONDS = 10.0  # for an ingress to tell its options


def deploy(config: DeployConfig) -> None:
    """Updates the application of a cluster, or starts a cluster and serves until a signal. Raises ValueError for
    options that cannot be used; SystemExit (1) when the cluster is lost."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError(f"deploy needs Ray ({error}); install it by `pip install 'slipstream[ray]'`") from error
    from slipstream.serve.fleet.application import key_digests_of

    key_digests = key_digests_of(config)
    stop = threading.Event()
    is_new = start_cluster(config)
    try:
        if is_new:
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
        serve.start(proxy_location="EveryNode", http_options={"host": config.host, "port": config.port})
        check_port(config)
        roll_out(config, key_digests)
        print(f"model at http://{config.host}:{config.port}, {config.replicas} replicas, draft {config.draft}", end="")
        if not is_new:
            print("; the cluster serves it until `serve shutdown`", flush=True)
            return
        print(" (Ctrl-C ends it)", flush=True)
        watch(config, stop)
        drain(config)
        serve.delete(config.name)
    finally:
        ray.shutdown()


def start_cluster(config: DeployConfig) -> bool:
    """Connects to the cluster, and starts one if there is none. Returns whether it did. Raises ValueError."""
    import ray

    if config.cluster != "local":
        try:
            ray.init(address=config.cluster, namespace="serve", log_to_driver=False, configure_logging=False)
            return False
        except ConnectionError as error:
            if config.cluster != "auto":
                raise ValueError(f"cluster {config.cluster} cannot be reached ({error}); name its address") from error
    # Numbers to count with, enough for new replicas before old ones end; no core is set aside.
    num_cpus = max(math.ceil(2 * config.cpus * config.most_replicas), os.cpu_count() or 1)
    ray.init(address="local", num_cpus=num_cpus, namespace="serve", include_dashboard=False)
    return True


def check_port(config: DeployConfig) -> None:
    """Raises ValueError if Serve runs already and listens elsewhere: it keeps the place that it was started with."""
    from ray.serve.context import _get_global_client

    place = _get_global_client().http_config
    for name in ("host", "port"):
        if getattr(place, name) != getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}, and Serve on this cluster has {getattr(place, name)}; give that "
                "one, or end Serve first (`serve shutdown`)"
            )


def roll_out(config: DeployConfig, key_digests: Sequence[bytes]) -> None:
    """Deploys, or replaces what is deployed without a pause. Raises ValueError, with a reason, where that fails.

    A draft changes no answer, so its replicas are replaced one after the other. Another target has another tokenizer
    and other answers: its replicas start beside the old ones, then ingresses are replaced, each of which knows the
    replicas of its own target alone, and then the old replicas end.
    """
    from slipstream.serve.fleet.application import application

    running = running_options(config.name)
    if running is not None and running.target_version != config.target_version:
        run(config.name, application(running, key_digests, retained=config))
        run(config.name, application(config, key_digests, retained=running))
    run(config.name, application(config, key_digests))


def run(name: str, application: object) -> None:
    from ray import serve

    try:
        serve.run(application, name=name, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the deployment failed ({reason_of(name) or error}); the log of Ray has more") from error


def running_options(name: str) -> DeployConfig | None:
    """Returns the options of the application that runs under this name."""
    from ray import serve

    if name not in serve.status().applications:
        return None
    handle: DeploymentHandle = serve.get_app_handle(name)
    values = handle.options(method_name="values").remote().result(timeout_s=ANSWER_SECONDS)
    return DeployConfig.read(values)


def reason_of(name: str) -> str:
    """Returns why the application is not healthy, as far as its replicas have said."""
    from ray import serve

    status = serve.status().applications.get(name)
    if status is None:
        return ""
    messages = [part.message for part in status.deployments.values() if part.status != "HEALTHY"]
    text = " ".join(" ".join(messages).split())
    return re.split(r"\b\w+(?:Error|Exception): ", text)[-1][-600:]  # without the traceback before it


def drain(config: DeployConfig) -> None:
    """Has ingresses refuse new requests, and waits up to `drain_timeout` for the open ones."""
    from ray import serve

    handle = serve.get_app_handle(config.name)
    deadline = time.monotonic() + config.drain_timeout
    while time.monotonic() < deadline and sum(handle.broadcast("drain").results(timeout_s=ANSWER_SECONDS)):
        time.sleep(LOOK_SECONDS / 4)


def watch(config: DeployConfig, stop: threading.Event) -> None:
    """Returns after SIGTERM. Raises KeyboardInterrupt; SystemExit (1) when the cluster no longer answers."""
    from ray import serve

    num_lost = 0
    while not stop.wait(LOOK_SECONDS):
        try:
            is_there = config.name in serve.status().applications
        except Exception as error:
            num_lost += 1
            if num_lost == LOST_LOOKS:
                raise SystemExit(f"slipstream deploy: the cluster no longer answers ({error})") from error
            continue
        num_lost = 0
        if not is_there:
            raise SystemExit(f"slipstream deploy: the application {config.name} was deleted")
