-- Parts of queries that more than one query needs. A query includes a part by its name with a colon, as in
-- `select :task_columns from tasklib.tasks`. psql replaces such names too, after `\set task_columns '...'`.


-- A task as clients see it. tasklib.record.Task has the same fields, and a test compares the two.
-- part: task_columns
id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error, retry_count, max_retries,
next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags, queue, ready, attempt, fencing_token, claimed_at,
expires_at, idempotency_key, payload_digest, serial_key, error_code, crash_count, suspect, store_result, on_crash, progress,
trace_headers, resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents, due_at,
cancel_asked_at, strikes, (completed_by).worker_id as completed_by, deadline_at


-- A task that a worker holds, as tasklib.outcomes.HeldTask. Python cannot read a time outside its calendar, such as
-- infinity, and one such value would fail the whole answer. So these times are replaced. Of a cancel request it is enough to
-- know that there is one.
-- part: held_columns
id, name, queue, state, worker_id, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect,
on_crash, timeout_seconds,
case when claimed_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then claimed_at
     else clock_timestamp() end as claimed_at,
case when started_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then started_at end as started_at,
expires_at, case when cancel_asked_at is not null then clock_timestamp() end as cancel_asked_at, deadline_at


-- What the UPDATE of a claim returns. The list begins with the columns that `noted` reads, because a row is taken apart only
-- as far as the last column that is needed. Arguments that are stored in more than 64 kB stay behind.
-- part: taken_columns
id, locked_until, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
timeout_seconds, expires_at, deadline_at, tags::text as tags, parent_id, store_result, id::text as id_text, priority, created_at,
claimed_at, queue, date_part('epoch', claimed_at - greatest(created_at, scheduled_at)) as waited_seconds,
case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then args::text end as args,
case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then kwargs::text end as kwargs


-- What a claim answers of each task. The worker reads these columns by name. Times are sent as numbers: Python takes as long
-- for one date as for six numbers. Arguments that exceed the task's share of the answer (most_bytes) stay behind.
-- part: claimed_columns
id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash, timeout_seconds,
expires_at, deadline_at,
case when octet_length(args) + octet_length(kwargs) <= most_bytes then args end as args,
case when octet_length(args) + octet_length(kwargs) <= most_bytes then kwargs end as kwargs,
tags, parent_id, store_result, id_text, waited_seconds, claim_id, date_part('epoch', claimed_at) as claimed_epoch,
date_part('epoch', clock_timestamp()) as answered_epoch, date_part('epoch', created_at) as submitted, priority


-- The recursive half of a walk through the queues that have a ready task, in the order of their names: one probe of the
-- index for each queue, however many tasks it has. The walk is called `queues`, ends with a null, and is only as long as the
-- query reads it. Operators name their schema because `ready_queues` runs on connections of applications.
-- part: further_queues
union all
select (select queue from tasklib.tasks
         where ready and queue operator(pg_catalog.>) queues.queue order by queue limit 1)
from queues where queues.queue is not null
