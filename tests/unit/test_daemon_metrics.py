"""Every metric, the counters that outlive a child, the supervisor's totals, and the exposition."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasklib.outcomes import AttemptOutcome
from tasklib.runtime import metrics as worker_metrics
from tasklib.runtime.loop import FailureKind
from tasklib.runtime.metrics import Amounts, Found, histogram
from tasklib_daemon import counters, crashes, election, gauges, keeper, metrics, reporting
from tasklib_daemon.counters import CounterMetrics, Counters, Totals
from tasklib_daemon.plan import Cause
from tasklib_daemon.scoreboard import Scoreboard, ScoreboardView
from tasklib_daemon.settings import Web
from tasklib_daemon.web.app import HealthApp, LatestReport
from tasklib_daemon.web.samples import HANDOVER_SECONDS
from tests.support.promtool import by_labels, check_metrics, needs_promtool, parsed, value
from tools import metrics_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tasklib_daemon.status import ChildStatus, Status

STATUS: Status = {
    "name": "host", "version": "1.2.3", "pid": 1, "started_at": "2026-01-01T00:00:00+00:00", "state": "running",
    "is_healthy": True, "problems": [], "database": True, "listening": False, "elected": True, "term": 7,
    "unserved": [], "wanted_workers": 2, "concurrency": 4, "connections": 5, "budget": 40, "memory_bytes": 1,
    "cpu_seconds": 0.5,
    "workers": [
        {"slot": 1, "pid": 2, "state": "ready", "started_at": "2026-01-01T00:00:01+00:00", "restarts": 3, "running": 2,
         "claimed": 1, "unwritten": 4, "connections": 3, "beat_age_seconds": 0.1, "memory_bytes": 10,
         "cpu_seconds": 1.0, "is_hung": False},
        {"slot": 2, "pid": None, "state": "waiting", "started_at": None, "restarts": 1},
    ],
    "keeper": {"slot": 1, "pid": 4, "state": "ready", "started_at": "2026-01-01T00:00:01+00:00", "restarts": 0},
}  # fmt: skip


@pytest.fixture
def own_ledger() -> Iterator[Counters]:
    made = Counters()
    yield made
    with contextlib.suppress(BufferError):  # somebody still counts in it
        made.close()


# --- names ---


def test_names_follow_the_conventions() -> None:
    """Base units at the end of the name, a sentence of help, labels that are words, and each name once."""
    names = [metric.full_name for metric in metrics.ALL]
    assert len(names) == len(set(names)) > 50
    for metric in metrics.ALL:
        assert metric.full_name.startswith("tasklib_")
        assert metric.help.endswith("."), metric
        assert metric.unit or metric.kind == "gauge", metric
        if metric.unit in {"seconds", "bytes", "ratio", "info"}:
            assert metric.name.endswith(f"_{metric.unit}"), metric
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert [*metric.buckets] == sorted(metric.buckets)


def test_labels_are_few_and_never_a_users_value() -> None:
    """All but the names of tasks and queues, which are bounded, have values of our own making."""
    ours = {
        "found", "outcome", "cause", "how", "process", "loop", "kind", "state", "slot", "version", "python", "role",
        "table", "task", "queue",
    }  # fmt: skip
    assert {label for metric in metrics.ALL for label in metric.labels} == ours
    assert set(metrics.MOST_NAMES) == {"task", "queue"}


def test_every_metric_that_is_made_from_a_word_is_counted_somewhere() -> None:
    """A word that nobody says any more would be a series of zeros for ever."""
    modules = (worker_metrics, crashes, election, gauges, keeper, reporting, counters)
    said = {
        node.value
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(metrics.BY_WORD) <= said


def test_the_page_has_every_metric() -> None:
    """If this fails: python3 dev.py metrics."""
    text = metrics_table.PAGE.read_text(encoding="utf-8")
    assert text == metrics_table.page_with(text)


def test_the_page_says_how_labels_are_bounded() -> None:
    """With the real figures."""
    text = " ".join(metrics_table.PAGE.read_text(encoding="utf-8").split())
    tasks, queues = metrics.MOST_NAMES["task"], metrics.MOST_NAMES["queue"]
    assert f"distinguishes {tasks} task names, {queues} queues, and {metrics.MOST_PAIRS} pairs of both" in text
    assert f"the {queues} longest queues" in text
    assert f"a daemon distinguishes {tasks} task functions" in text


def test_every_word_of_a_tally_has_its_metric(own_ledger: Counters) -> None:
    """The counters refuses others: a worker must not find out."""
    own = CounterMetrics(own_ledger, "worker")
    own.claimed("default", [], "poll", 0.1)
    own.flushed(1, 0.1)
    own.found("mail", "default", "FAILED", seconds=0.1, will_retry=True)
    own.found("mail", "default", "TIMED_OUT", seconds=0.1, will_retry=False)
    own.expired(1)
    own.lost(1, "worker_died")
    own.fenced(1)
    own.lease_lost("ran_out")
    own.failed("claim", "outage")
    own.rounds({"claim": 1})
    assert all(sum(values) for key, values in own_ledger.read().items() if key != ("others",))


def test_names_beyond_the_bound_are_others() -> None:
    """The first of each kind are told apart; what came first stays."""
    bounds = metrics.Bounds()
    for number in range(250):
        bounds.within(metrics.BURIED, (f"task_{number}",))
    assert bounds.within(metrics.BURIED, ("task_5",)) == ("task_5",)
    assert bounds.within(metrics.BURIED, ("task_220",)) == ("other",)


def test_tasks_beside_queues_are_bounded_too() -> None:
    """A queue for each customer: not a histogram for each task of each of them. The tasks are still told apart."""
    bounds = metrics.Bounds()
    given = [(f"task_{task}", f"customer_{queue}") for queue in range(90) for task in range(30)]
    found = {each: bounds.within(metrics.DURATION, each) for each in given}
    assert len(set(found.values())) == metrics.MOST_PAIRS + 30
    assert found["task_29", "customer_0"] == ("task_29", "customer_0")
    assert found["task_29", "customer_80"] == ("task_29", "other")
    assert {each: bounds.within(metrics.DURATION, each) for each in given} == found


# --- the counters ---


def test_a_ledger_is_read_as_it_was_written(own_ledger: Counters) -> None:
    """Numbers add up, histograms keep their buckets, and new keys come after old ones were read."""
    own = CounterMetrics(own_ledger, "worker")
    own.add({("failed", "mail", "default"): [1.0]})
    assert own_ledger.read()["failed", "mail", "default"] == [1.0]
    own.add({("failed", "mail", "default"): [2.0], ("recovery",): histogram(metrics.RECOVERY.buckets, [0.3])})
    found = own_ledger.read()
    assert found["failed", "mail", "default"] == [3.0]
    assert found["recovery",] == histogram(metrics.RECOVERY.buckets, [0.3])


def test_a_ledger_outlives_the_process_that_wrote_it(own_ledger: Counters) -> None:
    """SIGKILL right after a count: the parent reads it all the same."""
    pid = os.fork()
    if pid == 0:
        CounterMetrics(own_ledger, "worker").add({("buried", "bad"): [4.0]})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert own_ledger.read()["buried", "bad"] == [4.0]


def test_a_full_ledger_counts_what_it_cannot_hold(own_ledger: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither grows nor raises; that something was left out is told."""
    monkeypatch.setattr(counters, "NUMBERS", 3)
    own = CounterMetrics(own_ledger, "worker")
    for number in range(5):
        own.add({("buried", f"task_{number}"): [1.0]})
    found = own_ledger.read()
    assert found["others",] == [3.0]
    assert {key for key in found if key[0] == "buried"} == {("buried", "task_0"), ("buried", "task_1")}


def test_any_number_of_queues_takes_a_bounded_memory(own_ledger: Counters) -> None:
    """Names that users make up, one for each customer say, end up as others, and nothing is remembered of them."""
    own = CounterMetrics(own_ledger, "worker")
    for number in range(1000):
        own.add({("claimed", f"customer_{number}", "poll"): [1.0]})
    found = own_ledger.read()
    assert found["claimed", "other", "poll"] == [900.0]
    assert found["others",] == [900.0]
    assert len(own._offsets) == len(found) == 102


def test_whatever_the_names_every_count_has_its_place(own_ledger: Counters) -> None:
    """More tasks and queues than are told apart, with names as long as they may be, and every outcome: nothing is lost,
    and what comes later has its place as well.
    """
    own = CounterMetrics(own_ledger, "worker")
    tasks = [f"{number:_>200}" for number in range(250)]
    queues = [f"{number:_>48}" for number in range(120)]
    of_pairs = [metric for metric in metrics.BY_WORD.values() if metric.labels[:2] == ("task", "queue")]
    pairs = [*zip(tasks, itertools.cycle(queues), strict=False)]
    pairs += zip(tasks, itertools.cycle(queues[1:]), strict=False)  # each task once more, when the pairs are used up
    pairs += itertools.product(tasks[:10], queues)
    for pair in pairs:
        for metric in of_pairs:
            for outcome in get_args(AttemptOutcome) if "outcome" in metric.labels else [None]:
                last = [] if outcome is None else [outcome.lower()]
                own.add({(metric.word or "", *pair, *last): [1.0] * metric.size})
    for queue, found in itertools.product(queues, get_args(Found)):
        own.add({("claimed", queue, found): [1.0]})
    for task in tasks:
        own.add({("buried", task): [1.0], ("suspected", task): [1.0]})
    for metric in metrics.BY_WORD.values():
        if not {"task", "queue"} & {*metric.labels}:
            own.add({(metric.word or "", *metric.labels): [1.0] * metric.size})

    def counted(word: str) -> float:
        return sum(values[0] for key, values in own_ledger.read().items() if key[0] == word)

    assert counted("finished") == len(pairs) * len(get_args(AttemptOutcome))
    assert counted("duration") == counted("failed") == len(pairs)
    assert counted("claimed") == len(queues) * len(get_args(Found))
    assert counted("buried") == len(tasks)
    assert counted("fenced") == counted("lease_lost") == 1


@pytest.mark.parametrize("tell", [CounterMetrics.settled, CounterMetrics.completed])
def test_the_scoreboard_says_what_the_counters_have(
    own_ledger: Counters, tell: Callable[[CounterMetrics, list[Any]], None]
) -> None:
    """After a death, whoever finds these tasks on the scoreboard need not count them once more."""
    scoreboard = Scoreboard(1)
    own = CounterMetrics(own_ledger, "worker", scoreboard)
    own.add({("failed", "mail", "default"): [1.0]})
    assert not scoreboard.read().is_counted
    tell(own, [])
    assert scoreboard.read().is_counted
    scoreboard.close()


# --- the totals ---


def view(*, ended: int, executing: int) -> ScoreboardView:
    slot = object()
    return ScoreboardView("", 2, 0.0, True, ended, 0, (), (slot,) * executing, ())  # type: ignore[arg-type]


def counting(amounts: Amounts) -> Counters:
    made = Counters()
    CounterMetrics(made, "worker").add(amounts)
    return made


def test_the_dead_are_counted_with_the_living() -> None:
    """A counter never goes down because a worker died; and a child is counted once, however often it is looked at."""
    totals = Totals()
    first, second = counting({("buried", "a"): [1.0]}), counting({("buried", "a"): [2.0]})
    for _ in range(3):
        totals.look(1, first, None)
        totals.look(2, second, None)
    assert totals.totals()["buried", "a"] == [3.0]
    totals.close(1, first, None)
    assert totals.totals()["buried", "a"] == [3.0]
    totals.count("deaths", "crash")
    assert totals.totals()["deaths", "crash"] == [1.0]


def test_what_has_started_never_becomes_less() -> None:
    """What executes has started, and so has what has ended. A scoreboard that is read while it is written may tell
    less.
    """
    totals, empty = Totals(), Counters()
    totals.look(1, empty, view(ended=3, executing=2))
    assert totals.totals()["started",] == [5.0]
    totals.look(1, empty, view(ended=3, executing=1))
    assert totals.totals()["started",] == [5.0]
    totals.close(1, empty, view(ended=5, executing=1))
    assert totals.totals()["started",] == [6.0]


def test_only_what_is_new_is_written_down() -> None:
    """And only what the statistics by the minute have."""
    totals = Totals()
    own = Counters()
    counts = CounterMetrics(own, "worker")
    counts.add({("finished", "mail", "default", "completed"): [5.0], ("buried", "mail"): [1.0]})
    totals.look(1, own, None)
    assert totals.take_for_statistics() == {("finished", "mail", "default", "completed"): [5.0]}
    assert totals.take_for_statistics() == {}
    counts.add({("finished", "mail", "default", "completed"): [2.0]})
    totals.close(1, own, None)
    assert totals.take_for_statistics() == {("finished", "mail", "default", "completed"): [2.0]}


def test_amounts_go_through_a_message() -> None:
    """As JSON, and back."""
    amounts: Amounts = {("failed", "mail", "default"): [1.0], ("recovery",): histogram(metrics.RECOVERY.buckets, [0.3])}
    assert counters.from_json(counters.to_json(amounts)) == amounts


# --- what is told ---


def told(status: Status, totals: Amounts | None = None, samples: list[object] | None = None, age: float = 0.0) -> str:
    report = LatestReport()
    if status:
        report.take_status(status)
    report.take_totals(totals or {})
    report.take_gauges(samples or [], report.now() - age)
    answer = HealthApp(Web(), report).answer("GET", "/metrics", {})
    assert answer.code == 200
    assert answer.text is not None
    return answer.text.decode()


CLUSTER: list[object] = [
    ["queue_tasks", ["default", "ready"], 3.0],
    ["tasks_submitted", [], 9.0],
    ["of tomorrow", [], 1.0],
]


def test_a_status_is_told_as_gauges() -> None:
    """Processes by role and slot, states as ones and zeros."""
    series = parsed(told(STATUS))
    assert value(series, "tasklib_workers", state="ready") == 1
    assert value(series, "tasklib_workers", state="waiting") == 1
    assert value(series, "tasklib_slots") == 4
    assert value(series, "tasklib_worker_unwritten_tasks", slot="1") == 4
    assert value(series, "tasklib_daemon_state", state="running") == 1
    assert value(series, "tasklib_daemon_state", state="paused") == 0
    assert value(series, "tasklib_listener_up") == 0
    assert value(series, "tasklib_connections_open", process="worker") == 3
    assert value(series, "tasklib_process_restarts_total", role="worker", slot="2") == 1
    assert value(series, "tasklib_election_term") == 7


def test_histograms_are_told_as_prometheus_counts_them() -> None:
    """Buckets include the smaller ones; count and sum are theirs."""
    totals: Amounts = {("recovery",): histogram(metrics.RECOVERY.buckets, [0.3, 0.3, 9000.0])}
    series = parsed(told(STATUS, totals))
    assert value(series, "tasklib_recovery_duration_seconds_bucket", le="0.25") == 0
    assert value(series, "tasklib_recovery_duration_seconds_bucket", le="0.5") == 2
    assert value(series, "tasklib_recovery_duration_seconds_bucket", le="+Inf") == 3
    assert value(series, "tasklib_recovery_duration_seconds_count") == 3
    assert value(series, "tasklib_recovery_duration_seconds_sum") == pytest.approx(9000.6)


def test_the_cluster_is_told_by_the_elected_one_alone() -> None:
    """Or its depth would be there once for each daemon. What is not known yet is left out."""
    assert value(parsed(told(STATUS, samples=CLUSTER)), "tasklib_queue_tasks", queue="default", state="ready") == 3
    others = parsed(told({**STATUS, "elected": False}, samples=CLUSTER, age=HANDOVER_SECONDS))
    assert not {name for name, _ in others if name == "tasklib_queue_tasks" or name.startswith("tasklib_database_t")}


def test_the_cluster_does_not_vanish_at_an_election() -> None:
    """Who was elected goes on to show what it read last, until the next one has read: an alert that has to hold for a
    while would begin anew.
    """
    age = HANDOVER_SECONDS - 1
    before = parsed(told({**STATUS, "elected": False, "term": None}, samples=CLUSTER, age=age))
    assert value(before, "tasklib_queue_tasks", queue="default", state="ready") == 3
    assert (value(before, "tasklib_gauges_age_seconds") or 0.0) >= age
    assert value(before, "tasklib_elected") == 0


def test_what_has_no_labels_is_there_from_the_start() -> None:
    """A counter that appears with its first count has no rate, and no alert sees it."""
    series = parsed(told(STATUS))
    for metric in metrics.BY_WORD.values():
        if not metric.labels and metric.kind == "counter":
            assert value(series, metric.full_name) == 0, metric


def test_causes_are_there_from_the_start() -> None:
    """Deaths, losses and lost leases by each of their causes: the first one, too, is to wake somebody."""
    series = parsed(told(STATUS, {("deaths", "hang"): [2.0], ("lost", "worker_died"): [1.0]}))
    assert by_labels(series, "tasklib_worker_deaths_total", "cause") == {
        (cause,): 2.0 if cause == "hang" else 0.0 for cause in get_args(Cause)
    }
    assert by_labels(series, "tasklib_tasks_lost_total", "cause") == {("worker_died",): 1.0, ("lease_expired",): 0.0}
    assert by_labels(series, "tasklib_leases_lost_total", "how") == {("ran_out",): 0.0, ("fenced",): 0.0}


def test_what_is_known_of_a_task_is_there_before_it_happens() -> None:
    """It was claimed: however it ends, and if it never failed before, there is a nought to begin with. Of a queue, how
    its tasks are found; of a loop, how it fails.
    """
    totals: Amounts = {
        ("wait", "mail", "bulk"): histogram(metrics.WAIT.buckets, [0.3]),
        ("claimed", "bulk", "poll"): [1.0],
        ("rounds", "keeper", "duties"): [5.0],
    }
    series = parsed(told(STATUS, totals))
    assert by_labels(series, "tasklib_tasks_finished_total", "task", "queue", "outcome") == {
        ("mail", "bulk", outcome.lower()): 0.0 for outcome in get_args(AttemptOutcome)
    }
    for name in ("tasks_failed_total", "tasks_retried_total", "task_duration_seconds_count"):
        assert value(series, f"tasklib_{name}", task="mail", queue="bulk") == 0
    assert value(series, "tasklib_tasks_buried_total", task="mail") == 0
    assert by_labels(series, "tasklib_tasks_claimed_total", "queue", "found") == {
        ("bulk", found): 1.0 if found == "poll" else 0.0 for found in get_args(Found)
    }
    assert by_labels(series, "tasklib_database_errors_total", "process", "loop", "kind") == {
        ("keeper", "duties", kind): 0.0 for kind in get_args(FailureKind)
    }


def test_before_the_first_status_there_is_an_answer() -> None:
    """It says how long nothing was told."""
    series = parsed(told({}))
    assert [name for name, _ in series] == ["tasklib_status_age_seconds"]


def test_it_is_made_once_for_what_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred scrapes a second cost one rendering a second."""
    clock = iter([0.0] * 1000)
    report = LatestReport(lambda: next(clock))
    report.take_status(STATUS)
    app = HealthApp(Web(), report)
    texts = [app.answer("GET", "/metrics", {}).text for _ in range(100)]
    assert all(text is texts[0] for text in texts)
    report.take_totals({("buried", "a"): [1.0]})
    assert app.answer("GET", "/metrics", {}).text is not texts[0]


def test_ages_grow_although_nobody_tells_anything() -> None:
    """A supervisor that hangs, a keeper that reads no more: that is when their ages matter."""
    now = [100.0]
    report = LatestReport(lambda: now[0])
    report.take_status(STATUS)
    report.take_gauges(CLUSTER, read_at=95.0)
    app = HealthApp(Web(), report)

    def ages() -> tuple[float | None, float | None]:
        text = app.answer("GET", "/metrics", {}).text
        assert text is not None
        series = parsed(text.decode())
        return value(series, "tasklib_status_age_seconds"), value(series, "tasklib_gauges_age_seconds")

    assert ages() == (0.0, 5.0)
    now[0] = 160.0
    assert ages() == (60.0, 65.0)


def test_while_one_worker_replaces_another_the_one_that_serves_is_told() -> None:
    """Both have the same slot. A series must not be there twice, nor jump between them."""
    old: ChildStatus = {"slot": 1, "pid": 2, "state": "stopping", "running": 1, "restarts": 3, "memory_bytes": 10}
    new: ChildStatus = {"slot": 1, "pid": 3, "state": "ready", "running": 2, "restarts": 3, "memory_bytes": 20}
    for workers in ([old, new], [new, old]):
        text = told({**STATUS, "workers": workers})
        series = parsed(text)
        assert value(series, "tasklib_worker_executing_tasks", slot="1") == 2
        assert value(series, "tasklib_process_resident_memory_bytes", role="worker", slot="1") == 20
        assert text.count("tasklib_worker_executing_tasks{") == 1


def test_a_worker_that_hangs_is_not_told_as_ready() -> None:
    """It has a slot and a process, and does nothing."""
    series = parsed(told({**STATUS, "workers": [{"slot": 1, "pid": 2, "state": "ready", "is_hung": True}]}))
    assert value(series, "tasklib_workers", state="hung") == 1
    assert value(series, "tasklib_workers", state="ready") == 0
    assert value(series, "tasklib_slots") == 0


def test_labels_are_escaped() -> None:
    """Whatever a name has in it, the text stays readable."""
    series = parsed(told(STATUS, {("buried", 'a"\\\nb'): [1.0]}))
    assert value(series, "tasklib_tasks_buried_total", task='a"\\\nb') == 1


def everything() -> str:
    """Each metric that there is, at least once."""
    totals: Amounts = {
        (metric.word or "", *(f"a_{label}" for label in metric.labels)): [1.0] * metric.size
        for metric in metrics.BY_WORD.values()
    }
    cluster: list[object] = [
        [metric.name, [f"a_{label}" for label in metric.labels], 1.0] for metric in metrics.ALL if metric.is_cluster
    ]
    return told(STATUS, totals, cluster)


def test_every_metric_can_be_told() -> None:
    """Under its own name, type and help."""
    families = {family.name: family for family in text_string_to_metric_families(everything())}
    for metric in metrics.ALL:
        family = families[metrics.PREFIX + metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples


@needs_promtool
def test_promtool_has_nothing_to_object_to() -> None:
    """`promtool check metrics` over all that there is."""
    assert check_metrics(everything()) == ""
