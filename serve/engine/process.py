"""The engine's process: builds the engine, then takes requests from a pipe and sends back the outputs of each step.

Messages in: the EngineConfig; then lists of Request, Abort, Ping, SwapDraft, and None to end. Other threads of this
process put calls between these. Messages out: `engine.info` once it is ready, then Step, Swapped and Rejected; Failed
before an end that nobody asked for. A step and its Outputs are one message, so that a step costs one write. Every
message is answered by a Step: at once by an idle engine, else after the step, within METRICS_SECONDS more.

The engine's end of the pipe blocks; the server's is an asyncio stream, so that neither a full pipe nor half a message
stops its event loop.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream import runtime
from slipstream.models.states.address import Address
from slipstream.serve import logs
from slipstream.serve.engine import members
from slipstream.serve.engine.counts import DraftState, EngineCounts
from slipstream.serve.options import TRIAL_ROUNDS, EngineConfig, ServeConfig
from slipstream.serve.pipe import Pipe
from slipstream.serve.request import Output, Request, RequestStats

if TYPE_CHECKING:
    from slipstream.models.files.learning import Offer
    from slipstream.serve.engine.engine import Engine
    from slipstream.serve.engine.learning import Learner

METRICS_SECONDS = 0.1  # a busy engine sends its gauges at most this often
MOST_EARLY_RANKS = 8  # that start before it is known that there are so many devices
QUIET_SECONDS = 0.05  # without a message or a request, after which the engine works for later ones

logger = logging.getLogger(__name__)

Call = Callable[[], None]  # of another thread of this process, for the one that steps the engine


EngineFactory = Callable[[EngineConfig], "Engine"]  # importable, since it is pickled
Inbox = SimpleQueue  # of Message | None


@dataclass(frozen=True, slots=True)
class Abort:
    """`is_whole`: the answer has all that its client wants, up to a stop string."""

    request_id: str
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Makes an idle engine send a Step."""


@dataclass(frozen=True, slots=True)
class SwapDraft:
    """Asks for other weights of the draft, on trial for so many rounds. Answered by a Swapped of this `number`."""

    number: int
    name: str
    trial_rounds: int


@dataclass(frozen=True, slots=True)
class Swapped:
    """`error`: why nothing was changed."""

    number: int
    draft: DraftState | None
    error: str = ""


Message = Request | Abort | Ping | SwapDraft | Call


@dataclass(frozen=True, slots=True)
class Step:
    outputs: list[Output]
    metrics: dict[str, float] | None  # the engine's gauges, if due
    counts: EngineCounts | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    error: ValueError


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


def build_engine(config: EngineConfig) -> "Engine":
    from slipstream.serve.engine import build  # here, so that only the engine's process loads it

    # INFO: the chosen backends and captured passes. A ServeConfig names the format, `LLM` has none.
    logs.configure(getattr(config, "log_format", "text"), level=logging.INFO)
    engine = build.build_engine(config)
    engine.keep_record()
    engine.load_grammars()
    return engine


def run_engine(make_engine: EngineFactory, end: socket.socket) -> None:
    """Target of the process. Ends with status 1 after a Failed message."""
    inbox: Inbox = SimpleQueue()
    pipe = Pipe(end)
    options: Future[EngineConfig] = Future()
    threading.Thread(target=receive_options, args=(pipe, options), daemon=True).start()
    if make_engine is build_engine:
        import xgrammar  # noqa: F401  for `load_grammars`

        import slipstream.serve.engine.build  # noqa: F401  which takes seconds, while the server reads its options
    try:
        config = options.result()
    except EOFError:
        return  # the options were wrong
    threading.Thread(target=listen, args=(pipe, inbox), daemon=True).start()
    engine, learner = start_engine(make_engine, config, pipe, inbox)
    if learner is not None:
        attach(learner, engine, inbox)
    try:
        with runtime.frozen_heap():
            serve_requests(engine, inbox, pipe)
    except ConnectionError:
        pass  # the HTTP process closed the pipe; drop this step's outputs
    except ChildProcessError as error:  # another rank was lost
        end_at_once(pipe, one_line(error))
    except Exception as error:
        logger.exception("the engine failed in a step")  # before the message, at which the server closes the pipe
        pipe.send(Failed(f"the engine failed in a step with {type(error).__name__}; its traceback is in the log"))
        raise SystemExit(1) from error
    if learner is not None:
        learner.close()
    try:
        engine.close()
    except (OSError, ValueError, MemoryError) as error:  # ValueError: another process is writing the file
        logger.error("the n-grams of this run could not be saved: %s", one_line(error))


def receive_options(pipe: Pipe, options: "Future[EngineConfig]") -> None:
    """Receives the options, and starts other ranks while this process imports its modules."""
    try:
        config = pipe.receive()
        if config.tp <= min(MOST_EARLY_RANKS, runtime.usable_cores()):
            with suppress(OSError):  # told when the engine is built
                members.prepare(config.tp)
        options.set_result(config)
    except BaseException as error:
        options.set_exception(error)


def learns(config: EngineConfig) -> bool:
    return isinstance(config, ServeConfig) and config.learn.device != ""


def start_learner(config: Any) -> "Learner":
    from slipstream.serve.engine.learning import Learner, with_states

    return Learner(with_states(config), config.learn)


def attach(learner: "Learner", engine: Any, inbox: Inbox) -> None:
    """Lets weights that the trainer offers serve on trial."""

    def offer(weights: "Offer") -> None:
        logger.info(
            "learn: held-out texts are accepted %.3f tokens long with new weights, %.3f with those that serve; of "
            "%.0f s, steps have taken %.0f and evaluations %.0f",
            *(weights.after, weights.before, *map(weights.seconds.get, ("all", "steps", "evaluations"))),
        )
        swap_draft(SwapDraft(0, weights.folder, TRIAL_ROUNDS), engine, inbox, answer)

    def answer(swapped: Swapped) -> None:
        if swapped.draft is None:
            logger.warning("learn: %s", swapped.error)
            learner.judge("refused")

    learner.attach(engine, offer, inbox.put)


def start_engine(
    make_engine: EngineFactory, config: EngineConfig, pipe: Pipe, inbox: Inbox
) -> "tuple[Engine, Learner | None]":
    try:
        with ExitStack() as failure:
            listener = bind_states(config)
            learner = failure.enter_context(closing(start_learner(config))) if learns(config) else None
            engine = make_engine(config if learner is None else learner.config)
            if listener is not None:
                engine.open_states(config, inbox.put, listener)
            failure.pop_all()
    except (ValueError, OSError) as error:  # the user's to fix; the message suffices
        pipe.send(Failed(one_line(error)))
        raise SystemExit(1) from error
    except Exception as error:
        logger.exception("the engine could not be built")
        pipe.send(Failed(f"{type(error).__name__}: {one_line(error)}"))
        raise SystemExit(1) from error
    pipe.send(engine.info)
    pipe.send(Step([], engine.metrics(), engine.counts()))
    engine.watch(partial(end_at_once, pipe))
    return engine, learner


def bind_states(config: EngineConfig) -> socket.socket | None:
    """Takes the address of states, if the engine gives any."""
    if not isinstance(config, ServeConfig) or config.states is None:
        return None
    from slipstream.serve.engine.state_service import bind  # here, since few servers need it

    return bind(Address.parse("states", config.states))


def end_at_once(pipe: Pipe, reason: str) -> NoReturn:
    """Ends the process, though another thread may wait in a step."""
    logger.error("%s", reason)
    with suppress(ConnectionError):
        pipe.send(Failed(reason))
    os._exit(1)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def listen(pipe: Pipe, inbox: Inbox) -> None:
    """Keeps the pipe empty, so that the server never waits for a step before it can write."""
    while True:
        try:
            messages = pipe.receive()
        except (EOFError, OSError):
            os._exit(1)  # the server is gone; exit at once, even during a step or while loading
        for message in messages:
            inbox.put(message)
            if message is None:
                return


def serve_requests(engine: "Engine", inbox: Inbox, pipe: Pipe) -> None:
    """Steps while there is work, otherwise waits for messages; returns on None."""
    metrics_due = 0.0
    while True:
        outputs: list[Output] = []
        for message in take(inbox, engine):
            if message is None:
                return
            if isinstance(message, SwapDraft):
                threading.Thread(target=swap_draft, args=(message, engine, inbox, pipe.send), daemon=True).start()
            else:
                outputs += handle(message, engine, pipe)
        if engine.has_work:
            outputs += engine.step()
        now = time.monotonic()
        is_due = now >= metrics_due or not engine.has_work
        if is_due:
            metrics_due = now + METRICS_SECONDS
        if outputs or is_due:
            pipe.send(Step(outputs, engine.metrics(), engine.counts()) if is_due else Step(outputs, None))


def take(inbox: Inbox, engine: "Engine") -> Iterator[Message | None]:
    """Yields all messages in the inbox; if no request is open, at least one."""
    if not engine.has_work:
        yield wait_for_message(inbox, engine)
    try:
        while True:
            yield inbox.get_nowait()
    except Empty:
        return


def wait_for_message(inbox: Inbox, engine: "Engine") -> Message | None:
    """Returns the next message. Once it is quiet, the engine works for later requests in the meantime."""
    try:
        return inbox.get(timeout=QUIET_SECONDS)
    except Empty:
        while inbox.empty() and engine.work_idle():
            pass
        return inbox.get()


def swap_draft(swap: SwapDraft, engine: "Engine", inbox: Inbox, answer: Callable[[Swapped], None]) -> None:
    """Reads the weights of a draft on this thread, and has the engine's thread let them serve and answer."""
    error = ""
    try:
        staged = engine.stage_draft(swap.name)
    except (ValueError, OSError) as fault:
        error = one_line(fault)
    except Exception as fault:
        logger.exception("draft %s could not be read", swap.name)
        error = f"draft {swap.name} cannot be read ({type(fault).__name__}); see the log"

    def finish() -> None:
        if error:
            answer(Swapped(swap.number, None, error))
            return
        try:
            state = engine.swap_draft(staged, swap.trial_rounds)
        except ValueError as fault:
            answer(Swapped(swap.number, None, one_line(fault)))
        else:
            answer(Swapped(swap.number, state))

    inbox.put(finish)


def handle(message: Request | Abort | Ping | Call, engine: "Engine", pipe: Pipe) -> list[Output]:
    if isinstance(message, Ping):
        return []
    if callable(message):
        message()
        return []
    if isinstance(message, Abort):
        output = engine.abort(message.request_id, is_whole=message.is_whole)
        return [] if output is None else [output]
    try:
        engine.add(message)
    except ValueError as error:
        pipe.send(Rejected(message.id, error))
    except Exception as error:
        logger.exception("request %s could not be queued", message.id)
        reason = f"the engine could not queue this request ({type(error).__name__}); its traceback is in the log"
        stats = RequestStats(prompt_tokens=len(message.prompt))
        return [Output(request_id=message.id, tokens=[], finish_reason="error", stats=stats, error=reason)]
    return []
