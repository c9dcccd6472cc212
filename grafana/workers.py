"""Daemons, their processes, and the database: who is alive, what each does, what it costs."""

from __future__ import annotations

from grafana.overview import PLACE
from grafana.panels import Dashboard, Query, Row, Variable, graph, quantiles, stat, table

# Cluster gauges are the elected daemon's: not asked for by instance, or choosing another one would hide them.
VARIABLES = (*PLACE, Variable("instance", "tasklib_build_info", "Daemon"))


def _mean(histogram: str, legend: str) -> Query:
    total, count = (f"sum(rate({histogram}_{each}{{@instance}}[$__rate_interval]))" for each in ("sum", "count"))
    return Query(f"{total} / ({count} > 0)", legend)


DAEMONS = Row("Daemons", [
    stat(
        "Healthy",
        "Daemons without a crash loop, of those that are scraped.",
        Query("sum(tasklib_daemon_healthy{@instance})", "healthy"),
        Query("count(tasklib_build_info{@instance})", "daemons"),
        unit="none", width=4, alerts=["TasklibCrashLoop"],
    ),
    stat(
        "Elected",
        "Daemons that do the cluster's duties: exactly one, except for a moment.",
        Query("sum(tasklib_elected{@})"),
        unit="none", width=4, alerts=["TasklibElectionWrong"],
    ),
    stat(
        "Live workers",
        "In the database's eyes, of all daemons and of workers without one.",
        Query('max(tasklib_cluster_workers{@, state="alive"})'),
        unit="none", width=4, alerts=["TasklibNoWorkers"],
    ),
    stat(
        "Slots",
        "Tasks that all live workers can execute at once.",
        Query("max(tasklib_cluster_slots{@})"),
        unit="none", width=4,
    ),
    stat(
        "Supervisor's last word",
        "How long ago the supervisor told its web child anything; it does so every second.",
        Query("max(tasklib_status_age_seconds{@instance})"),
        unit="s", width=4, steps=[(5, "yellow"), (30, "red")], alerts=["TasklibSupervisorSilent"],
    ),
    stat(
        "Connections",
        "Database connections of these daemons, of the most that they may open.",
        Query(
            "sum(tasklib_connections_open{@instance}) / clamp_min(sum(tasklib_connections_budget{@instance}), 1)"
        ),
        unit="percentunit", width=4, steps=[(1.01, "red")], alerts=["TasklibConnectionsScarce"],
    ),
    table(
        "Daemons",
        "One line for each: its version, state, and how long its supervisor has been running.",
        Query("max by (instance, version, python) (tasklib_build_info{@instance})"),
        Query("max by (instance, state) (tasklib_daemon_state{@instance} == 1)"),
        Query("max by (instance) (tasklib_elected{@instance})", "elected"),
        Query("max by (instance) (tasklib_database_up{@instance})", "connected"),
        Query("max by (instance) (tasklib_listener_up{@instance})", "listening"),
        Query(
            'time() - max by (instance) (tasklib_process_start_time_seconds{@instance, role="supervisor"})',
            "running for",
        ),
        unit="none", units={"running for": "s"}, by=["instance", "version", "python", "state"], sort="running for",
        alerts=["TasklibDaemonDown"],
    ),
    graph(
        "Election",
        "Which daemon does the cluster's duties. A hand-over takes seconds.",
        Query("max by (instance) (tasklib_elected{@instance})", "{{instance}}"),
        unit="short", most=1, alerts=["TasklibElectionWrong"],
    ),
    graph(
        "Elections won",
        "In the last hour. Many: a keeper loses its connection, or is short of time.",
        Query("sum by (instance) (increase(tasklib_elections_won_total{@instance}[1h]))", "{{instance}}"),
        unit="short", alerts=["TasklibElectionWrong"],
    ),
    graph(
        "Term",
        "Grows with every election: the figure that tells an old holder from the present one.",
        Query("max by (namespace, job) (tasklib_election_term{@})", "{{job}}"),
        unit="short",
    ),
])  # fmt: skip

WORKERS = Row("Workers", [
    graph(
        "Workers by state",
        "waiting: dead, and about to be started. hung: makes no progress, about to be killed.",
        Query("sum by (state) (tasklib_workers{@instance})", "{{state}}"),
        Query("sum(tasklib_workers_wanted{@instance})", "wanted"),
        unit="short", alerts=["TasklibNoWorkers", "TasklibWorkersMissing"],
    ),
    graph(
        "What workers hold",
        "Executing, claimed and waiting in a buffer, ended and not yet written; and how many could execute at once.",
        Query("sum(tasklib_worker_executing_tasks{@instance})", "executing"),
        Query("sum(tasklib_worker_buffered_tasks{@instance})", "in buffers"),
        Query("sum(tasklib_worker_unwritten_tasks{@instance})", "not yet written"),
        Query("sum(tasklib_slots{@instance})", "slots"),
        unit="short",
    ),
    graph(
        "Since the last progress",
        "Of each worker's claim loop. A worker is killed after hang_seconds, or stall_seconds while tasks execute.",
        Query("max by (instance, slot) (tasklib_worker_beat_age_seconds{@instance})", "{{instance}} {{slot}}"),
        unit="s", alerts=["TasklibWorkersDying"],
    ),
    graph(
        "Deaths",
        "Of workers, in the last hour, by cause. recycled and shutdown were asked for.",
        Query("sum by (cause) (increase(tasklib_worker_deaths_total{@instance}[1h]))", "{{cause}}"),
        unit="short", alerts=["TasklibWorkersDying", "TasklibCrashLoop"],
    ),
    graph(
        "Restarts",
        "Of processes, in the last hour, after a death that nobody asked for.",
        Query("sum by (role) (increase(tasklib_process_restarts_total{@instance}[1h]))", "{{role}}"),
        unit="short", alerts=["TasklibWorkersDying"],
    ),
    graph(
        "Recovery",
        "From a worker's death until its tasks were runnable again. Within a second, while the database answers.",
        *quantiles("tasklib_recovery_duration_seconds_bucket{@instance}"),
        unit="s", alerts=["TasklibTasksLost"],
    ),
    graph(
        "Tasks taken back",
        "In the last hour: from workers that died, and from hosts or daemons that fell silent.",
        Query("sum by (cause) (increase(tasklib_tasks_lost_total{@instance}[1h]))", "{{cause}}"),
        unit="short", alerts=["TasklibTasksLost"],
    ),
    graph(
        "Leases lost, writes refused",
        "In the last hour. ran_out: a worker could not renew in time. fenced, refused: another had its tasks by then.",
        Query("sum by (how) (increase(tasklib_leases_lost_total{@instance}[1h]))", "lease {{how}}"),
        Query("sum(increase(tasklib_fenced_writes_total{@instance}[1h]))", "writes refused"),
        unit="short", alerts=["TasklibLeasesLost"],
    ),
    graph(
        "Memory",
        "Resident memory of each process. Workers that only grow: `[recycle] max_memory_mb`.",
        Query(
            "max by (instance, role, slot) (tasklib_process_resident_memory_bytes{@instance})",
            "{{instance}} {{role}} {{slot}}",
        ),
        unit="bytes",
    ),
    graph(
        "CPU",
        "Cores in use by each process. A worker at 1: its tasks share one interpreter; add workers.",
        Query(
            "sum by (instance, role, slot) (rate(tasklib_process_cpu_seconds_total{@instance}[$__rate_interval]))",
            "{{instance}} {{role}} {{slot}}",
        ),
        unit="short",
    ),
])  # fmt: skip

STATEMENTS = Row("Claims, finishes, notifications", [
    graph(
        "Claim statement",
        "Round trip of the statement that takes tasks. Slow with an empty queue: dead rows, or an old transaction.",
        *quantiles("tasklib_claim_duration_seconds_bucket{@instance}"),
        unit="s", alerts=["TasklibDeadTuplesGrowing", "TasklibOldTransactionHoldsVacuum"],
    ),
    graph(
        "Finish statement",
        "Round trip of the statement that writes outcomes, with its commit: the disk's fsync is in it.",
        *quantiles("tasklib_finish_duration_seconds_bucket{@instance}"),
        unit="s",
    ),
    graph(
        "Tasks per statement",
        "On average. Large under load; claims that find nothing count as 0.",
        _mean("tasklib_claim_batch_tasks", "claimed"),
        _mean("tasklib_finish_batch_tasks", "finished"),
        unit="short",
    ),
    graph(
        "Notifications",
        "Heard in a second, by the daemons' listeners.",
        Query("sum(rate(tasklib_notifications_total{@instance}[$__rate_interval]))", "heard"),
        unit="ops", alerts=["TasklibListenerDeaf"],
    ),
    graph(
        "Rounds of loops",
        "In a second. A loop that stands still does not grow; crashes, finish and watch wait until there is something.",
        Query(
            "sum by (process, loop) (rate(tasklib_loop_rounds_total{@instance}[$__rate_interval]))",
            "{{process}} {{loop}}",
        ),
        unit="ops", alerts=["TasklibKeeperStandsStill"],
    ),
    graph(
        "Errors by loop",
        "Rounds that failed, in a second, of the ten loops with most: outage (no connection), refused (by the server), "
        "bug (of ours).",
        Query(
            "topk(10, sum by (process, loop, kind)"
            " (rate(tasklib_database_errors_total{@instance}[$__rate_interval])))",
            "{{process}} {{loop}} {{kind}}",
        ),
        unit="ops", alerts=["TasklibDbErrors", "TasklibDatabaseDown"],
    ),
])  # fmt: skip

DATABASE = Row("PostgreSQL", [
    graph(
        "Size of tables",
        "With indexes and TOAST. Grows with what is kept: `[retention]`.",
        Query("max by (table) (tasklib_database_table_bytes{@})", "{{table}}"),
        unit="bytes", is_stacked=True,
    ),
    graph(
        "Rows",
        "As PostgreSQL estimates them.",
        Query("max by (table) (tasklib_database_live_tuples{@})", "{{table}}"),
        unit="short",
    ),
    graph(
        "Dead rows",
        "Versions of rows that VACUUM has still to remove. A saw-tooth is right; a ramp is not.",
        Query("max by (table) (tasklib_database_dead_tuples{@})", "{{table}}"),
        unit="short", alerts=["TasklibDeadTuplesGrowing"],
    ),
    graph(
        "Oldest transaction",
        "Keeps VACUUM from removing dead rows. Other roles' sessions are seen by a member of pg_monitor only.",
        Query("max(tasklib_database_oldest_transaction_age_seconds{@})", "age"),
        unit="s", limit=900, alerts=["TasklibOldTransactionHoldsVacuum"],
    ),
    graph(
        "Notify queue",
        "How full the server's queue of notifications is; a listener that does not read fills it. When it is full, "
        "commits that notify fail.",
        Query("max(tasklib_database_notify_queue_usage_ratio{@})", "used"),
        unit="percentunit", most=1, limit=0.25, alerts=["TasklibNotifyQueueFilling"],
    ),
    graph(
        "Connections to the server",
        "Of everybody, and how many there can be; and those of these daemons by process.",
        Query("max(tasklib_database_connections{@})", "in use"),
        Query("max(tasklib_database_connections_limit{@})", "limit"),
        Query("sum by (process) (tasklib_connections_open{@instance})", "of {{process}}"),
        Query("sum(tasklib_connections_budget{@instance})", "budget"),
        unit="short", alerts=["TasklibConnectionsScarce"],
    ),
    graph(
        "Age of the cluster's figures",
        "Since the elected daemon last read depths and sizes, and how long that took.",
        Query("max(tasklib_gauges_age_seconds{@})", "age"),
        Query("max(tasklib_gauges_read_duration_seconds{@})", "reading took"),
        unit="s", limit=120, alerts=["TasklibGaugesStale"],
    ),
    graph(
        "Readings that failed",
        "Of depths and sizes, in the last hour: they have a time limit of their own.",
        Query("sum(increase(tasklib_gauges_failures_total{@}[1h]))", "failed"),
        unit="short", alerts=["TasklibGaugesStale"],
    ),
    graph(
        "Label values cut",
        "Names of tasks or queues beyond the bound, that were counted as `other`, since the daemons started.",
        Query("sum(tasklib_series_dropped_total{@instance})", "cut"),
        unit="short",
    ),
])  # fmt: skip

WORKERS_AND_DATABASE = Dashboard(
    "tasklib-workers",
    "tasklib / Workers and database",
    "Who is alive, what each does, and how PostgreSQL bears it.",
    VARIABLES,
    [DAEMONS, WORKERS, STATEMENTS, DATABASE],
)
