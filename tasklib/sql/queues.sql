-- Statements of operators: the policies of queues and of the cluster, what is in force now, and the audit. All are sent by people, a
-- few an hour. They take no lock that a worker or a submit waits for, and the reads wait for no operator.


-- The queue, if it has a row.
-- name: get
select :queue_columns, :queue_in_force
from tasklib.queues as policy
:joined_to_what_is_in_force
where policy.name = $1::text;


-- All queues that have a row, and all in which a task is ready. The walk takes one probe of the index for each queue. A queue
-- without a row has the values that a new row would have, and no created_at.
-- name: list
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    :further_queues
), known as (
    select policy.* from tasklib.queues as policy
    union all
    select made.*
      from queues,
           jsonb_populate_record(
               null::tasklib.queues, jsonb_build_object('name', queues.queue, 'rank', 0, 'weight', 1, 'audit', false)) as made
     where queues.queue is not null and not exists (select from tasklib.queues as policy where policy.name = queues.queue)
)
select :queue_columns, :queue_in_force
from known as policy
:joined_to_what_is_in_force
order by policy.name;


-- Sets what $2 names, and answers the queue with what is in force after the change.
-- name: set
select :queue_columns, :queue_in_force
from tasklib.set_queue($1::text, $2::text::jsonb, $3::text) as policy
:joined_to_what_is_in_force;


-- Pauses until $3, or for $4 seconds by the database's clock.
-- name: pause
select :queue_columns, :queue_in_force
from tasklib.pause_queue(
    $1::text, $2::text, coalesce($3::timestamptz, clock_timestamp() + $4::double precision * interval '1 second')) as policy
:joined_to_what_is_in_force;


-- name: resume
select tasklib.resume_queue($1::text, $2::text);


-- What holds for all queues.
-- name: get_cluster
select :cluster_columns, held.permits_in_use, held.permit_holders
from tasklib.policy as policy
cross join lateral (:permits_of_all) as held;


-- name: set_cluster
select :cluster_columns, held.permits_in_use, held.permit_holders
from tasklib.set_cluster($1::text::jsonb, $2::text) as policy
cross join lateral (:permits_of_all) as held;


-- The audit of one queue, or of everything, newest first. That of a queue is read back from the newest row of all.
-- name: transitions
select id, at, actor, verb, task_id, queue, before, after, reason
from tasklib.task_transitions
where $1::text is null or queue = $1::text
order by id desc
limit $2::integer;


-- The audit of one task, newest first, by its index.
-- name: transitions_of_task
select id, at, actor, verb, task_id, queue, before, after, reason
from tasklib.task_transitions
where task_id = $1::uuid and ($2::text is null or queue = $2::text)
order by id desc
limit $3::integer;
