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
expires_at, case when cancel_asked_at is not null then clock_timestamp() end as cancel_asked_at,
case when deadline_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then deadline_at end as deadline_at


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


-- Of a row of queue_limits: nothing of the queue starts now, because it is paused, or because all of its cap is in use.
-- part: is_closed
(limits.is_paused or limits.cap <= limits.permits)


-- The recursive half of a walk through the queues that have a ready task, in the order of their names: one probe of the
-- index for each queue, however many tasks it has. The walk is called `queues`, ends with a null, and is only as long as the
-- query reads it. Operators name their schema because `ready_queues` runs on connections of applications.
-- part: further_queues
union all
select (select queue from tasklib.tasks
         where ready and queue operator(pg_catalog.>) queues.queue order by queue limit 1)
from queues where queues.queue is not null


-- How a claim goes on when `next` has the ids: the tasks are taken and the claim is noted; what a worker has to know before it sleeps
-- is added if the claim is short. $1: the worker, $4: the limit, $5: how long tasks are locked, $6: see `claim`.
-- part: take_next
taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $5::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(array(select id from next))
    returning :taken_columns
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
), known as (
    select count(*) < $4::integer as is_short, 16777216 / greatest(count(*), 1) as most_bytes from next
)
select :claimed_columns, is_short,
       case when is_short
            then (select true from tasklib.tasks where ready and suspect order by priority desc, created_at, id limit 1)
       end as has_suspects,
       case when is_short
            then (select date_part('epoch', min(due_at) - clock_timestamp()) from tasklib.tasks where due_at is not null)
       end as due_seconds,
       case when is_short and $6::text[] is not null then exists (
           with recursive queues as (
               (select queue from tasklib.tasks where ready order by queue limit 1)
               :further_queues
           )
           select from queues where queue <> all($6::text[])) end as has_elsewhere,
       case when is_short then (select version from tasklib.policy) end as policy_version
from known left join (taken cross join noted) on true


-- The policy of a queue, as the first fields of tasklib.queues.Queue. A test compares them. An end of a pause that Python cannot
-- read, such as infinity, is none.
-- part: queue_columns
policy.name::text as name, policy.max_running, policy.max_per_worker, policy.rate_limit, policy.rate_seconds, policy.rate_burst,
policy.breaker_failures, policy.breaker_share, policy.breaker_window_seconds, policy.breaker_open_seconds,
policy.breaker_probes, policy.breaker_codes, policy.ageing_seconds, policy.rank, policy.weight, policy.default_priority,
policy.default_max_retries, policy.default_timeout_seconds, policy.retention_days, policy.audit, policy.paused_at,
policy.paused_by, policy.pause_reason,
case when policy.paused_until between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then policy.paused_until
     end as paused_until,
policy.created_at, policy.changed_at, policy.changed_by


-- What a queue allows now, and what workers hold of it: the last fields of tasklib.queues.Queue. While a breaker is closed,
-- queue_limits has a large cap, so that workers ask for permits: that is no limit to people.
-- part: queue_in_force
coalesce(limits.is_paused, false) as is_paused,
case limits.breaker when 'closed' then policy.max_running else limits.cap end as effective_cap,
limits.breaker as breaker_state,
case when limits.breaker <> 'closed' then limits.open_until end as breaker_open_until,
held.permits_in_use, held.permit_holders


-- part: joined_to_what_is_in_force
left join lateral tasklib.queue_limits_now(policy.name::text) as limits on true
cross join lateral (
    select coalesce(sum(permits), 0)::bigint as permits_in_use, count(*) filter (where permits > 0) as permit_holders
      from tasklib.permits where permits.queue = policy.name::text
) as held


-- The row of the cluster, as the first fields of tasklib.queues.ClusterPolicy.
-- part: cluster_columns
policy.cluster_wide_cap, policy.refuses_unknown_queues, policy.features, policy.version


-- part: permits_of_all
select coalesce(sum(permits), 0)::bigint as permits_in_use, count(*) filter (where permits > 0) as permit_holders
  from tasklib.permits where queue = '*'
