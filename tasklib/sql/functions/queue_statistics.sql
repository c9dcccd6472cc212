-- The state of the queues: how many tasks wait or are held in each, and for how long its oldest and its newest ready task
-- have been ready. Of one queue, or of all queues that have such tasks.
--
--     select * from tasklib.queue_statistics();
--
-- Only tasks that wait or are held are read. At most `most` ready tasks are counted in each queue, in the index alone. The
-- other tasks have to be read from the table: at most a tenth of `most`, of all queues together. Those that become due, or
-- expire, first are read first.
--
-- The oldest task is looked for among the first hundred that were submitted in each priority, in the hundred lowest
-- priorities. A delayed or retried task is not old because it was submitted long ago: its age counts from when it became
-- ready. So a hundred retries that have just become ready may hide a task that has waited for an hour. Therefore, where there
-- are that many, a few tasks are looked at that were submitted one minute ago, two, five and so on. Tasks are claimed in the
-- order in which they were submitted: if one of them waits, all that were submitted after it have waited too.
--
-- jit is off. Before PostgreSQL 18, a plan with scans that are switched off, and used all the same, has such a high cost that
-- it is compiled. That took a second, with no task in the table.
--
-- Security definer: a role that may see these figures need not see the tasks.
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
    set jit = off
as $$
    with recursive lanes (queue) as (
        select first.queue
          from (select task.queue::text from tasklib.tasks as task
                 where task.ready and task.queue >= coalesce($1, '')  -- bounds the scan, even without a queue
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
        select ranks.queue, min(least(first.since, later.since)) as oldest, max(last.since) as newest
          from ranks
         cross join lateral (
             select min(greatest(head.created_at, head.scheduled_at, head.next_retry_at)) as since, count(*) as tasks
               from (select task.created_at, task.scheduled_at, task.next_retry_at from tasklib.tasks as task
                      where task.ready and task.queue = ranks.queue and task.priority = ranks.priority
                      order by task.created_at limit 100) as head) as first
         cross join lateral (
             select min(greatest(found.created_at, found.scheduled_at, found.next_retry_at)) as since
               from unnest(case when first.tasks = 100 then
                        array[60, 120, 300, 600, 1200, 2400, 4800, 9600, 19200, 86400] end) as made (seconds_ago),
                    lateral (select task.created_at, task.scheduled_at, task.next_retry_at from tasklib.tasks as task
                              where task.ready and task.queue = ranks.queue and task.priority = ranks.priority
                                and task.created_at >= (select clock_timestamp()) - made.seconds_ago * interval '1 second'
                              order by task.created_at limit 5) as found) as later
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
          from (select distinct worker_id, task_id  -- a task that was claimed twice is in two claims
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
    select found.queue,
           coalesce(sum(tasks) filter (where kind = 'ready'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'scheduled'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'retrying'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'claimed'), 0)::bigint,
           coalesce(sum(tasks) filter (where kind = 'running'), 0)::bigint,
           greatest(extract(epoch from clock_timestamp() - min(oldest)), 0)::double precision,
           greatest(extract(epoch from clock_timestamp() - max(newest)), 0)::double precision
      from (select counts.queue, kind, tasks, null::timestamptz as oldest, null::timestamptz as newest from counts
            union all  -- a join would compare each queue with each other one
            select ages.queue, 'age', 0, oldest, newest from ages) as found
     group by found.queue
     order by found.queue
$$;
revoke all on function tasklib.queue_statistics(text, bigint) from public;
