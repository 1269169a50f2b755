"""Which server is asked: the least busy, not the dead, and the dead one again once it is back."""

import threading
import time

import httpx2
import openai
import pytest

from eagle3lib.engine.client import Answer, BadReply
from eagle3lib.engine.pool import Pool, PoolStopped, RequestFailed, RequestRefused
from eagle3lib.lab.errors import UserError

REQUEST = httpx2.Request("POST", "http://x")
LOST = openai.APIConnectionError(message="lost", request=REQUEST)


def status(code):
    kind = {400: openai.BadRequestError, 404: openai.NotFoundError}.get(
        code, openai.InternalServerError
    )
    return kind(f"status {code}", response=httpx2.Response(code, request=REQUEST), body=None)


class FakeClient:
    """Fails with ``error`` while it is set; ``gate`` holds its answers back."""

    def __init__(self, url, model="target"):
        self.url, self._model = url, model
        self.error, self.unreachable, self.gate = None, False, None
        self.asked = self.probes = 0

    def model(self):
        if self.unreachable:
            raise UserError(f"no server answers at {self.url}")
        return self._model

    def probe(self):
        self.probes += 1
        if self.unreachable:
            raise LOST
        return self._model

    def version(self):
        return f"version of {self.url}"

    def chat(self, messages, *, model, **_):
        assert model == "target"
        self.asked += 1
        if self.gate:
            self.gate.wait(10)
        if self.error or self.unreachable:
            raise self.error or LOST
        return Answer([1], [2], "x", "stop", 0.1, None)


@pytest.fixture
def clients():
    return [FakeClient("a"), FakeClient("b")]


def pool_of(clients, **options):
    pool = Pool(clients, **({"back_off_s": 0.02, "give_up_s": 10, "tries": 4} | options))
    pool.check()
    return pool


def test_the_least_busy_is_asked_and_equals_in_turn(clients):
    pool = pool_of(clients)
    for _ in range(10):
        pool.chat([])
    assert [c.asked for c in clients] == [5, 5]
    first = clients[0]
    first.gate = threading.Event()
    slow = [threading.Thread(target=pool.chat, args=([],)) for _ in range(2)]
    for thread in slow:
        thread.start()
    while first.asked < 6:
        time.sleep(0.001)
    for _ in range(10):
        assert pool.chat([]).server == "b"
    first.gate.set()
    for thread in slow:
        thread.join()
    assert first.asked == 6


def test_a_dead_server_is_set_aside_its_requests_answered_elsewhere_and_it_is_taken_back(clients):
    pool = pool_of(clients, back_off_s=0.05)
    clients[0].unreachable = True
    assert [pool.chat([]).server for _ in range(20)] == ["b"] * 20
    asked = clients[0].asked
    assert asked == 1  # not once more: a probe comes first
    time.sleep(0.06)
    pool.chat([])
    assert clients[0].asked == asked and clients[0].probes >= 1
    clients[0].unreachable = False
    time.sleep(0.05 * 2 ** (clients[0].probes + 1))
    assert {pool.chat([]).server for _ in range(6)} == {"a", "b"}


def test_the_back_off_doubles_up_to_a_limit(clients):
    pool = pool_of(clients[:1], back_off_s=0.02, max_back_off_s=0.05, give_up_s=0.5)
    clients[0].unreachable = True
    started = time.monotonic()
    with pytest.raises(UserError, match="no server has answered"):
        pool.chat([])
    assert 0.5 <= time.monotonic() - started < 2
    assert 2 <= clients[0].probes <= 12  # 0.02, 0.04, then every 0.05 s


def test_a_server_back_from_the_dead_gets_one_request_until_it_answered(clients):
    """Its health page may answer while its engine does not."""
    pool = pool_of(clients, tries=9)
    sick, well = clients
    sick.error = status(500)
    pool.chat([]), pool.chat([])
    sick.gate = well.gate = threading.Event()
    time.sleep(0.03)
    before, well_before = sick.asked, well.asked
    threads = [threading.Thread(target=pool.chat, args=([],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while sick.asked + well.asked < before + well_before + 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (sick.asked, well.asked) == (before + 1, well_before + 7)
    sick.error = None
    sick.gate.set()
    for thread in threads:
        thread.join()


def test_all_dead_for_too_long_is_a_user_error_that_names_each_and_its_last_error(clients):
    pool = pool_of(clients, give_up_s=0.1, tries=50)
    clients[0].error, clients[1].error = status(500), LOST
    with pytest.raises(UserError, match=r"a: status 500\n(?s:.)*b: lost(?s:.)*next: "):
        pool.chat([])


def test_a_refused_request_is_not_asked_of_others(clients):
    pool = pool_of(clients)
    clients[0].error = clients[1].error = status(400)
    with pytest.raises(RequestRefused, match="status 400"):
        pool.chat([])
    assert sum(c.asked for c in clients) == 1


def test_a_wrong_path_or_key_is_a_user_error_at_once(clients):
    pool = pool_of(clients)
    clients[0].error = clients[1].error = status(404)
    with pytest.raises(UserError, match="status 404"):
        pool.chat([])


def test_a_request_that_fails_while_others_succeed_is_given_up(clients):
    pool = pool_of(clients)
    pool.chat([])
    for client in clients:
        client.error = BadReply("half an answer")
    with pytest.raises(RequestFailed, match="half an answer"):
        pool.chat([])
    assert sum(c.asked for c in clients) == 5
    never = pool_of(clients)
    with pytest.raises(BadReply):  # nothing was ever whole: the server, not the request
        never.chat([])


def test_servers_must_serve_one_name_also_those_that_come_later(clients):
    with pytest.raises(UserError, match=r"'other'(?s:.)*'target'"):
        pool_of([clients[0], FakeClient("c", "other")])
    late = FakeClient("c", "other")
    late.unreachable = True
    pool = pool_of([clients[0], late])
    late.unreachable = False
    time.sleep(0.03)
    with pytest.raises(UserError, match="'other'"):
        pool.chat([])


def test_no_server_at_the_start_is_a_user_error(clients):
    for client in clients:
        client.unreachable = True
    with pytest.raises(UserError, match=r"answers at a\n(?s:.)*answers at b(?s:.)*next:"):
        pool_of(clients)
    with pytest.raises(UserError, match="at least one"):
        Pool([])


def test_a_stopped_pool_lets_go_of_those_that_wait(clients):
    pool = pool_of(clients[:1], back_off_s=5, give_up_s=60)
    clients[0].unreachable = True
    threading.Timer(0.1, pool.stop).start()
    started = time.monotonic()
    with pytest.raises(PoolStopped):
        pool.chat([])
    assert time.monotonic() - started < 2


def test_many_threads_lose_and_double_nothing(clients):
    pool = pool_of(clients, tries=50)
    done = []

    def work():
        for _ in range(50):
            done.append(pool.chat([]).server)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        clients[0].error = None if clients[0].error else LOST
        time.sleep(0.005)
    clients[0].error = None
    for thread in threads:
        thread.join(20)
    assert len(done) == 800
    assert all(server.busy == 0 for server in pool._servers)
