"""Queues and tasks: which waits, which fails, which takes the time."""

from __future__ import annotations

from grafana.overview import PLACE
from grafana.panels import Dashboard, Query, Row, Variable, graph, heatmap, stat, table

VARIABLES = (
    *PLACE,
    Variable("queue", "tasklib_queue_tasks", "Queue"),
    Variable("task", "tasklib_tasks_finished_total", "Task"),
)
FINISHED = "tasklib_tasks_finished_total{@queue+task}"
FAILED = 'tasklib_tasks_finished_total{@queue+task, outcome=~"failed|timed_out|worker_failure"}'
ENDED = 'tasklib_tasks_finished_total{@queue+task, outcome=~"completed|failed|timed_out|worker_failure"}'
READY = 'sum(max by (namespace, job, queue) (tasklib_queue_tasks{@queue, state="ready"}))'

QUEUES = Row("Queues", [
    stat(
        "Ready",
        "Tasks of these queues that could run now.",
        Query(READY),
        unit="short", width=6, alerts=["TasklibBacklogGrowing"],
    ),
    stat(
        "Gone in",
        "How long the workers will need for what is ready, if they go on as they do, and if nothing is added.",
        Query(READY + " / (sum(rate(tasklib_tasks_claimed_total{@queue}[$__rate_interval])) > 0)"),
        unit="s", width=6, no_value="nothing is claimed", alerts=["TasklibQueueStuck"],
    ),
    stat(
        "Late",
        "How long the longest overdue task has been due without being made ready; of all queues.",
        Query("max(tasklib_due_lag_seconds{@})"),
        unit="s", width=6, steps=[(10, "yellow"), (60, "red")], alerts=["TasklibScheduleMissed"],
    ),
    stat(
        "Names that nobody serves",
        "Of tasks that wait. `tasklibd status` has them.",
        Query("max(tasklib_unserved_names{@})"),
        unit="none", width=6, steps=[(1, "red")], alerts=["TasklibTasksUnserved"],
    ),
    graph(
        "Tasks by state",
        "ready: could run now. scheduled, retrying: wait. claimed: in a worker's buffer. running: executing.",
        Query("sum by (state) (max by (namespace, job, queue, state) (tasklib_queue_tasks{@queue}))", "{{state}}"),
        unit="short", is_stacked=True, width=12,
    ),
    graph(
        "Ready by queue",
        "Tasks that could run now.",
        Query(READY.replace("sum(", "sum by (queue) (", 1), "{{queue}}"),
        unit="short", width=12, alerts=["TasklibBacklogGrowing"],
    ),
    graph(
        "Oldest ready task",
        "How long the longest waiting ready task of each queue has been waiting. The line is where the alert begins.",
        Query("max by (queue) (tasklib_queue_oldest_ready_age_seconds{@queue})", "{{queue}}"),
        unit="s", limit=300, alerts=["TasklibQueueLatencyHigh", "TasklibQueueStuck"],
    ),
    graph(
        "Wait by queue, 95th percentile",
        "From when a task could run until a worker took it: 95 of 100 waited no longer.",
        Query(
            "histogram_quantile(0.95, sum by (le, queue)"
            " (rate(tasklib_queue_wait_seconds_bucket{@queue+task}[$__rate_interval])))",
            "{{queue}}",
        ),
        unit="s", alerts=["TasklibQueueLatencyHigh"],
    ),
    graph(
        "Claimed by queue",
        "Tasks that workers took, in a second.",
        Query("sum by (queue) (rate(tasklib_tasks_claimed_total{@queue}[$__rate_interval]))", "{{queue}}"),
        unit="ops", is_stacked=True, alerts=["TasklibQueueStuck"],
    ),
    heatmap(
        "Waits",
        "How many tasks waited how long for a worker. A dark band at the poll interval: nobody is woken.",
        Query(
            "sum by (le) (increase(tasklib_queue_wait_seconds_bucket{@queue+task}[$__rate_interval]))", "{{le}}"
        ),
        unit="s",
    ),
    heatmap(
        "Durations",
        "How many attempts took how long. Two bands: two kinds of work in one task, or timeouts.",
        Query(
            "sum by (le) (increase(tasklib_task_duration_seconds_bucket{@queue+task}[$__rate_interval]))", "{{le}}"
        ),
        unit="s",
    ),
])  # fmt: skip

POLICIES = Row("Policies", [
    table(
        "Policies",
        "Queues with a policy, as it holds now; `*` is the cap over all queues. `wanted`: permits that workers want "
        "beyond those that they hold. `breaker`: 0 closed, 1 half open, 2 open.",
        Query("max by (queue) (tasklib_queue_paused{@queue})", "paused"),
        Query("max by (queue) (tasklib_queue_waiting{@queue})", "tasks wait"),
        Query("max by (queue) (tasklib_queue_cap{@queue})", "cap"),
        Query("max by (queue) (tasklib_queue_permits{@queue})", "permits"),
        Query("max by (queue) (tasklib_queue_permits_wanted{@queue})", "wanted"),
        Query("max by (queue) (tasklib_queue_rate_available_starts{@queue})", "starts left"),
        Query("max by (queue) (tasklib_queue_rate_wait_seconds{@queue})", "next start in"),
        Query("max by (queue) (tasklib_queue_breaker_state{@queue})", "breaker"),
        unit="short", units={"next start in": "s"}, by=["queue"], sort="tasks wait",
        alerts=["TasklibQueuePausedLong", "TasklibQueueGateFull", "TasklibBreakerOpen"],
    ),
    graph(
        "Permits in use",
        "Of the cap of each queue, the part of which workers hold permits. At 100 % no more tasks of the queue start.",
        Query(
            "max by (queue) (tasklib_queue_permits{@queue}) / clamp_min(max by (queue) (tasklib_queue_cap{@queue}), 1)",
            "{{queue}}",
        ),
        unit="percentunit", alerts=["TasklibQueueGateFull"],
    ),
    graph(
        "Permits wanted, permits forgotten",
        "Permits that workers want beyond those that they hold, and permits of workers that are dead or unknown.",
        Query("max by (queue) (tasklib_queue_permits_wanted{@queue})", "{{queue}} wanted"),
        Query("max by (queue) (tasklib_queue_permits_forgotten{@queue})", "{{queue}} forgotten"),
        unit="short", alerts=["TasklibPermitsForgotten"],
    ),
    graph(
        "Paused queues",
        "1 while a queue is paused. Tasks of it wait, and are not counted by a scaler.",
        Query("max by (queue) (tasklib_queue_paused{@queue})", "{{queue}}"),
        unit="short", most=1, alerts=["TasklibQueuePausedLong"],
    ),
    graph(
        "Breakers",
        "The circuit breaker of each queue: 0 closed, 1 half open (probes run), 2 open (nothing starts).",
        Query("max by (queue) (tasklib_queue_breaker_state{@queue})", "{{queue}}"),
        unit="short", most=2, alerts=["TasklibBreakerOpen"],
    ),
    graph(
        "Wait for the rate",
        "Time until the rate limit of a queue grants the next start; 0 while it grants some at once.",
        Query("max by (queue) (tasklib_queue_rate_wait_seconds{@queue})", "{{queue}}"),
        unit="s",
    ),
    graph(
        "Starts left",
        "Starts that the rate limit of a queue would grant now. Always some: the limit does not bind.",
        Query("max by (queue) (tasklib_queue_rate_available_starts{@queue})", "{{queue}}"),
        unit="short",
    ),
])  # fmt: skip

TASKS = Row("Tasks", [
    table(
        "Tasks",
        "Over the time that is shown. `share` is the part of all working time; `failures` the part of attempts that "
        "failed, timed out or lost their worker.",
        Query(f"sum by (task) (increase({FINISHED}[$__range]))", "attempts"),
        Query(
            f"sum by (task) (increase({FAILED}[$__range]))"
            f" / (sum by (task) (increase({ENDED}[$__range])) > 0)",
            "failures",
        ),
        Query(
            "sum by (task) (increase(tasklib_task_duration_seconds_sum{@queue+task}[$__range]))"
            " / (sum by (task) (increase(tasklib_task_duration_seconds_count{@queue+task}[$__range])) > 0)",
            "mean",
        ),
        Query(
            "histogram_quantile(0.95, sum by (le, task)"
            " (increase(tasklib_task_duration_seconds_bucket{@queue+task}[$__range])))",
            "p95",
        ),
        Query(
            "sum by (task) (increase(tasklib_task_duration_seconds_sum{@queue+task}[$__range]))"
            " / scalar(sum(increase(tasklib_task_duration_seconds_sum{@}[$__range])) > 0)",
            "share",
        ),
        unit="short",
        units={"failures": "percentunit", "mean": "s", "p95": "s", "share": "percentunit"},
        by=["task"], sort="share", alerts=["TasklibFailureRatioHigh"],
    ),
    graph(
        "Attempts by task",
        "Attempts that ended in a second: the ten busiest tasks.",
        Query(f"topk(10, sum by (task) (rate({FINISHED}[$__rate_interval])))", "{{task}}"),
        unit="ops",
    ),
    graph(
        "Slowest tasks, 95th percentile",
        "Duration of attempts: the ten tasks that take longest.",
        Query(
            "topk(10, histogram_quantile(0.95, sum by (le, task)"
            " (rate(tasklib_task_duration_seconds_bucket{@queue+task}[$__rate_interval]))))",
            "{{task}}",
        ),
        unit="s",
    ),
    graph(
        "Time spent by task",
        "How many slots a task keeps busy on average: the ten that use most.",
        Query(
            "topk(10, sum by (task) (rate(tasklib_task_duration_seconds_sum{@queue+task}[$__rate_interval])))",
            "{{task}}",
        ),
        unit="short", is_stacked=True,
    ),
    graph(
        "Failing tasks",
        "Attempts that failed, timed out or lost their worker, in a second: the ten tasks with most.",
        Query(f"topk(10, sum by (task) (rate({FAILED}[$__rate_interval])))", "{{task}}"),
        unit="ops", alerts=["TasklibFailureRatioHigh"],
    ),
    graph(
        "Retried",
        "Attempts that failed or timed out and will be tried again, in a second.",
        Query(
            "topk(10, sum by (task) (rate(tasklib_tasks_retried_total{@queue+task}[$__rate_interval])))",
            "{{task}}",
        ),
        unit="ops",
    ),
    graph(
        "Failed for good",
        "Tasks that will not be tried again, in a second. `tasklib list --state failed` has them.",
        Query(
            "topk(10, sum by (task) (rate(tasklib_tasks_failed_total{@queue+task}[$__rate_interval])))",
            "{{task}}",
        ),
        unit="ops", alerts=["TasklibFailureRatioHigh", "TasklibTaskNeverSucceeds"],
    ),
    graph(
        "Suspects",
        "Tasks that executed when their worker died, in the last hour: the ten with most. They run alone next time.",
        Query("topk(10, sum by (task) (increase(tasklib_tasks_suspected_total{@task}[1h])))", "{{task}}"),
        unit="short", alerts=["TasklibTasksLost"],
    ),
    graph(
        "Buried",
        "Tasks that killed their workers while alone, again and again, since the daemons started: the ten with most. "
        "Kept for a person.",
        Query("topk(10, sum by (task) (tasklib_tasks_buried_total{@task}))", "{{task}}"),
        unit="short", alerts=["TasklibBuriedGrowing"],
    ),
    graph(
        "Given back, expired",
        "In a second: tasks that a worker had claimed and gave back unbegun, and tasks not started in time.",
        Query("sum(rate(tasklib_tasks_released_total{@}[$__rate_interval]))", "given back"),
        Query("sum(rate(tasklib_tasks_expired_total{@}[$__rate_interval]))", "expired"),
        unit="ops",
    ),
])  # fmt: skip

QUEUES_AND_TASKS = Dashboard(
    "tasklib-tasks",
    "tasklib / Queues and tasks",
    "Which queue waits, which task fails, which takes the time.",
    VARIABLES,
    [QUEUES, POLICIES, TASKS],
)
