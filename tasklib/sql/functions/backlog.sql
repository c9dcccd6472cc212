-- The size of the backlog, for a scaler: how many tasks are ready, are due, or are held by a worker. In the given queues, or
-- in all of them.
--
--     select tasklib.backlog(array['default', 'mail']);
--
-- Due tasks count even if no worker has made them ready yet: the scaler may have stopped all workers, because there was
-- nothing to do. Held tasks count, so that the scaler stops no worker that runs a task. Ready or due tasks of a queue
-- that is paused now do not count, and are not read: no worker would start them.
-- The count ends at `most`, and no more rows than that are read of each kind. A scaler asks every few seconds, and only wants
-- to know whether there is more work than all of its workers can do. Tasks that are due later are not read.
-- jit is off: to compile the query would take half a second (see tasklib.queue_statistics).
set local check_function_bodies = off;  -- a later file makes the view queue_limits
create or replace function tasklib.backlog(queues text[] default null, most bigint default 10000) returns bigint
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_hashjoin = off
    set enable_mergejoin = off
    set max_parallel_workers_per_gather = 0
    set jit = off
as $$
    with recursive lanes (queue) as (
        (select task.queue::text from tasklib.tasks as task where task.ready and $1 is null order by task.queue limit 1)
        union all
        select (select task.queue::text from tasklib.tasks as task
                 where task.ready and task.queue > lanes.queue order by task.queue limit 1)
          from lanes where lanes.queue is not null
    ), paused (queue) as materialized (
        select limits.queue from tasklib.queue_limits as limits where limits.is_paused
    )
    select least($2, (
        select count(*)
          from (select from (select lanes.queue from lanes where lanes.queue is not null
                             union select unnest($1)) as lane,
                            lateral (select from tasklib.tasks as task
                                      where task.ready and task.queue = lane.queue limit $2) as ready
                 where lane.queue not in (select paused.queue from paused)
                 limit $2) as counted
    ) + (
        select count(*)
          from (select task.queue, task.ready, task.pending_parents, least(task.expires_at, task.deadline_at) as expires_at
                  from tasklib.tasks as task
                 where task.due_at <= (select clock_timestamp())
                 order by task.due_at limit $2) as due
         where not due.ready and due.pending_parents = 0 and (due.expires_at is null or due.expires_at > clock_timestamp())
           and ($1 is null or due.queue = any($1)) and due.queue not in (select paused.queue from paused)
    ) + (
        select count(*)
          from (select distinct worker_id, task_id
                  from (select claim.worker_id, taken.task_id
                          from tasklib.claims as claim, unnest(claim.task_ids) as taken (task_id)
                         limit $2) as some_of_them) as taken
         cross join lateral (
             select task.queue from tasklib.tasks as task
              where task.id = taken.task_id and task.worker_id = taken.worker_id
             offset 0) as held
         where $1 is null or held.queue = any($1)
    ))
$$;
set local check_function_bodies = on;
revoke all on function tasklib.backlog(text[], bigint) from public;
