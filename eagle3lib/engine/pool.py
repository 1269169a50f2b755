"""Several servers of one target, asked as one: the least busy answers, a dead one is set aside.

The life of a server here::

    serving --a request failed--> aside --back-off over, probe answered--> on trial
       ^                            ^  (twice as long each time)              |
       |                            +------ its one request failed -----------+
       +------------------------------- its one request was answered ---------+

Cost: a lock around a few integers for each request; probes are made by the threads that ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from eagle3lib.engine.access import REFUSED, KeyRefused, refusal
from eagle3lib.engine.client import Answer, BadReply, Client, Message, NotExact
from eagle3lib.lab.errors import UserError

# The server understood the request and will not have it: too long for its context, most often.
_REFUSED = (400, 413, 422)
# Nothing that waiting or another prompt would mend: key, permission, path or model name.
_MISCONFIGURED = (*REFUSED, 404)
EMPTY_ANSWER = "empty answer"  # no token at all, not even the one that stops


class RequestRefused(Exception):
    """The server will not answer this request, whoever asks it again."""


class RequestFailed(Exception):
    """This request failed on every try, on servers that answer others."""


class PoolStopped(Exception):
    """:meth:`Pool.stop` was called while a request waited for its turn."""


@dataclass(frozen=True)
class Served:
    """An answer, and who gave it."""

    answer: Answer
    server: str
    engine: str


@dataclass
class _Server:
    client: Client
    engine: str = ""
    model: str = ""  # "" until it was reached
    busy: int = 0
    last_turn: int = 0  # number of the pool's request that it was last given
    failures: int = 0  # in a row, since its last answer
    failing_since_s: float = 0.0
    aside_until_s: float | None = None  # None: in service
    probing: bool = False
    error: str = ""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def ready(self) -> bool:
        """After a failure one request alone is risked, until it is answered."""
        return self.aside_until_s is None and (self.failures == 0 or self.busy == 0)


class Pool:
    """Ask the least busy of several servers; all calls are safe from many threads.

    ``back_off_s``: how long a server stays aside after its first failure, doubled with each further
    one up to ``max_back_off_s``. ``give_up_s``: when no server answered anything for so long, every
    one being aside, the run stops. ``tries``: how often one request may fail while others succeed.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        back_off_s: float = 1.0,
        max_back_off_s: float = 60.0,
        give_up_s: float = 300.0,
        tries: int = 6,
    ):
        if not clients:
            raise UserError("a pool needs at least one server", next="set parameter 'server'")
        self._servers = [_Server(client) for client in clients]
        self._back_off_s, self._max_back_off_s = back_off_s, max_back_off_s
        self._give_up_s, self._tries = give_up_s, tries
        self._changed = threading.Condition()
        self._stopped = False
        self._turn = 0
        self._model = ""
        self._answered = False  # whether any server ever gave a whole answer

    def check(self) -> str:
        """Name of the model that all servers serve. One that can't be reached is set aside.

        Raises ``UserError`` when none can be reached, or when two serve models of different names.
        """
        for server in self._servers:
            try:
                server.model = server.client.model()
            except KeyRefused:  # nothing that waiting would mend
                raise
            except UserError as error:
                self._failed(server, error.found)
            else:
                server.engine = server.client.version()
        reached = [s for s in self._servers if s.model]
        if not reached:
            raise UserError(
                "\n".join(s.error for s in self._servers),
                expected="an OpenAI-compatible server",
                next="check the addresses, or leave parameter 'server' empty to start one",
            )
        self._model = reached[0].model
        for server in reached[1:]:
            self._check_name(server, server.model)
        return self._model

    def chat(self, messages: list[Message], **options: Any) -> Served:
        """One answer from the least busy server, by another one when that fails.

        Raises ``RequestRefused`` or ``RequestFailed`` for a request that gets no answer,
        ``NotExact`` for an answer whose ids can't be told, ``UserError`` when no server gives any,
        ``PoolStopped`` after :meth:`stop`.
        """
        last: _Server | None = None
        for _ in range(self._tries):
            last = server = self._take(avoid=last)
            try:
                answer = server.client.chat(messages, model=self._model, **options)
                if not answer.answer_token_ids:  # a model says at least its stop token
                    raise BadReply(EMPTY_ANSWER)
            except NotExact:
                self._give(server, alive=True)  # it answered; asked again it would say the same
                raise
            except BadReply as error:
                self._give(server, alive=False)
                problem: Exception = error
            except openai.OpenAIError as error:
                self._judge(server, error)
                problem = error
            except BaseException:
                self._give(server, alive=False)
                raise
            else:
                self._give(server, alive=True)
                self._answered = True
                return Served(answer, server.url, server.engine)
        if isinstance(problem, BadReply):
            if not self._answered and problem.found != EMPTY_ANSWER:
                raise problem  # no answer was ever whole: it is the server, not this request
            raise RequestFailed(problem.found)
        raise RequestFailed(short(problem))

    def stop(self) -> None:
        """Let every request that waits for a server fail; those in flight are left to end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _judge(self, server: _Server, error: openai.OpenAIError) -> None:
        """Whose fault a failed request is; raises unless it may be asked again."""
        status = getattr(error, "status_code", None)
        if status in _REFUSED:
            self._give(server, alive=True)  # it is well enough to say no
            raise RequestRefused(short(error)) from None
        if status in _MISCONFIGURED:
            self._give(server, alive=False)
            if status in REFUSED:
                raise refusal(server.url, status) from None
            raise UserError(
                f"the server at {server.url} refuses to be asked: {short(error)}",
                expected="a chat endpoint at /v1",
                next="check the address and the name that it serves",
            ) from None
        with self._changed:
            server.busy -= 1
            self._failed(server, short(error))
        self._check_alive()

    def _take(self, avoid: _Server | None = None) -> _Server:
        """The least busy server in service, reserved for one request; waits while there is none."""
        while True:
            with self._changed:
                server = self._choose(avoid)
                if server is None:
                    continue
                if not server.probing:
                    server.busy += 1
                    self._turn += 1
                    server.last_turn = self._turn
                    return server
            self._probe(server)
            self._check_alive()

    def _choose(self, avoid: _Server | None) -> _Server | None:
        """A server to ask, or one to probe (marked so); None after a wait. Holds the lock."""
        if self._stopped:
            raise PoolStopped
        now = time.monotonic()
        for server in self._servers:
            until = server.aside_until_s
            if until is not None and until <= now and not server.probing:
                server.probing = True
                return server
        ready = [s for s in self._servers if s.ready and not s.probing]
        if ready:
            # Another server than the one that just failed; equals take turns.
            return min(ready, key=lambda s: (s is avoid, s.busy, s.last_turn))
        due = [s.aside_until_s for s in self._servers if s.aside_until_s and not s.probing]
        self._changed.wait(max(min(due) - now, 0.001) if due else None)
        return None

    def _probe(self, server: _Server) -> None:
        try:
            model = server.client.probe()
            engine = server.client.version()
        except openai.OpenAIError as error:
            with self._changed:
                server.aside_until_s = None  # a failed probe is a failure of its own
                self._failed(server, short(error))
        else:
            self._check_name(server, model)
            with self._changed:
                server.model, server.engine = model, engine
                server.aside_until_s = None
        finally:
            with self._changed:
                server.probing = False
                self._changed.notify_all()

    def _give(self, server: _Server, *, alive: bool) -> None:
        with self._changed:
            server.busy -= 1
            if alive:
                server.failures, server.aside_until_s = 0, None
            self._changed.notify_all()

    def _failed(self, server: _Server, error: str) -> None:
        """Set aside. Requests that fail together, when a server dies, are one failure."""
        server.error = error
        if server.aside_until_s is not None:
            return
        now = time.monotonic()
        if server.failures == 0:
            server.failing_since_s = now
        wait_s = min(self._back_off_s * 2**server.failures, self._max_back_off_s)
        server.failures += 1
        server.aside_until_s = now + wait_s

    def _check_alive(self) -> None:
        """Raise when every server is aside, and the last to fail has failed for too long."""
        with self._changed:
            self._changed.notify_all()
            if any(s.failures == 0 for s in self._servers):
                return
            silent_s = time.monotonic() - max(s.failing_since_s for s in self._servers)
        if silent_s >= self._give_up_s:
            each = "\n".join(f"  {s.url}: {s.error}" for s in self._servers)
            raise UserError(
                f"no server has answered for {silent_s:.0f} s; the last error of each:\n{each}",
                expected="one that answers; lost connections were already retried",
                next="look at the engine's log; then run it again, finished answers are kept",
            )

    def _check_name(self, server: _Server, model: str) -> None:
        if model != self._model:
            raise UserError(
                f"the server at {server.url} serves {model!r}, another one {self._model!r}",
                expected="one target, under one name, at all addresses of parameter 'server'",
            )


def short(error: Exception) -> str:
    """An error in one line."""
    return str(error).replace("\n", " ")[:300]
