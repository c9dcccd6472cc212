-- How the queues are: how many tasks wait or are held in each, and for how long the first and the last of the ready ones
-- have been ready. Of one queue, or of all that have such tasks.
--
--     select * from tasklib.queue_statistics();
--
-- Nothing is read but what waits or is held, and of that no more than `most` of each kind in each queue, a tenth where
-- the rows themselves have to be read. The oldest is looked for among the hundred that come first by their age in each
-- priority, of which the hundred lowest are looked at: one that was delayed is not old because it was made long ago.
--
-- Security definer: who may look at figures need not see the tasks.
create or replace function tasklib.queue_statistics(in_queue text default null, most bigint default 1000000)
    returns table (
        queue text, ready bigint, scheduled bigint, retrying bigint, claimed bigint, running bigint,
        oldest_ready_age_seconds double precision, newest_ready_age_seconds double precision)
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_hashjoin = off
    set enable_mergejoin = off
    set max_parallel_workers_per_gather = 0
as $$
    with recursive lanes (queue) as (
        select first.queue
          from (select task.queue::text from tasklib.tasks as task
                 where task.ready and task.queue >= coalesce($1, '')  -- a bound of the scan, also if there is none
                 order by task.queue limit 1) as first
         where $1 is null or first.queue = $1
        union all
        select (select task.queue::text from tasklib.tasks as task
                 where task.ready and task.queue > lanes.queue
                 order by task.queue limit 1)
          from lanes where lanes.queue is not null and $1 is null
    ), ranks (queue, priority, place) as (
        select lanes.queue, lowest.priority, 1
          from lanes, lateral (select task.priority from tasklib.tasks as task
                                where task.ready and task.queue = lanes.queue
                                order by task.priority limit 1) as lowest
        union all
        select ranks.queue, higher.priority, ranks.place + 1
          from ranks, lateral (select task.priority from tasklib.tasks as task
                                where task.ready and task.queue = ranks.queue and task.priority > ranks.priority
                                order by task.priority limit 1) as higher
         where ranks.place < 100
    ), ages as (
        select ranks.queue, min(first.since) as oldest, max(last.since) as newest
          from ranks
         cross join lateral (
             select min(greatest(head.created_at, head.scheduled_at, head.next_retry_at)) as since
               from (select task.created_at, task.scheduled_at, task.next_retry_at from tasklib.tasks as task
                      where task.ready and task.queue = ranks.queue and task.priority = ranks.priority
                      order by task.created_at limit 100) as head) as first
         cross join lateral (
             select max(greatest(tail.created_at, tail.scheduled_at, tail.next_retry_at)) as since
               from (select task.created_at, task.scheduled_at, task.next_retry_at from tasklib.tasks as task
                      where task.ready and task.queue = ranks.queue and task.priority = ranks.priority
                      order by task.created_at desc limit 10) as tail) as last
         group by ranks.queue
    ), counts (queue, kind, tasks) as (
        select lanes.queue, 'ready', found.tasks
          from lanes, lateral (select count(*) from (select from tasklib.tasks as task
                                                      where task.ready and task.queue = lanes.queue limit $2) as counted)
               as found (tasks)
         where lanes.queue is not null
        union all
        select waiting.queue, case waiting.state when 'failed' then 'retrying' else 'scheduled' end, count(*)
          from (select task.queue, task.state, task.ready from tasklib.tasks as task
                 where task.due_at is not null
                 order by task.due_at limit $2 / 10) as waiting
         where not waiting.ready and ($1 is null or waiting.queue = $1)
         group by 1, 2
        union all
        select held.queue, held.state, count(*)
          from (select distinct worker_id, task_id  -- one that was claimed twice is in two claims
                  from (select claim.worker_id, taken.task_id
                          from tasklib.claims as claim, unnest(claim.task_ids) as taken (task_id)
                         limit $2 / 10) as some_of_them) as taken
         cross join lateral (
             select task.queue, task.state from tasklib.tasks as task
              where task.id = taken.task_id and task.worker_id = taken.worker_id
             offset 0) as held
         where $1 is null or held.queue = $1
         group by 1, 2
    )
    select counts.queue,
           coalesce(sum(tasks) filter (where kind = 'ready'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'scheduled'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'retrying'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'claimed'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'running'), 0)::bigint,
           greatest(extract(epoch from clock_timestamp() - min(ages.oldest)), 0)::double precision,
           greatest(extract(epoch from clock_timestamp() - max(ages.newest)), 0)::double precision
      from counts left join ages on ages.queue = counts.queue
     group by counts.queue
     order by counts.queue
$$;
revoke all on function tasklib.queue_statistics(text, bigint) from public;
