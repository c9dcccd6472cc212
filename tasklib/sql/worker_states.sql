-- Statements about snapshots of workers.


-- Writes snapshots of all workers of a daemon. Values that are the same for all of them are sent once, or read from the policies.
-- name: note
insert into tasklib.worker_states (
    worker_id, hostname, pid, processes, tasks_running, tasks_claimed, memory_usage_mb, memory_percent, cpu_percent,
    worker_started_at, queues, max_claim_batch, max_claim_per_worker, recovery_config, cluster_wide_cap, queue_priorities,
    queue_max_concurrency)
select worker_id, hostname, pid, processes, tasks_running, tasks_claimed, memory_usage_mb, memory_percent, cpu_percent,
       worker_started_at, $2::text[], $3::integer, $4::integer, $5::jsonb,
       (select cluster_wide_cap from tasklib.policy),
       (select jsonb_object_agg(name, rank) from tasklib.queues where rank <> 0),
       (select jsonb_object_agg(name, max_running) from tasklib.queues where max_running is not null)
  from jsonb_to_recordset($1::jsonb) as each (
    worker_id text, hostname text, pid integer, processes integer, tasks_running integer, tasks_claimed integer,
    memory_usage_mb double precision, memory_percent double precision, cpu_percent double precision,
    worker_started_at timestamptz);


-- Deletes a batch, the oldest rows first. Answers how many were deleted.
-- name: prune
with gone as (
    delete from tasklib.worker_states
     where id = any(array(
         select id from tasklib.worker_states
          where snapshot_at < (select clock_timestamp() - $1::double precision * interval '1 second')
          order by snapshot_at limit (select $2::integer)))
    returning 1
)
select count(*) from gone;
