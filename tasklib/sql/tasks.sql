-- Statements about tasks. Parameters are $1, $2 ...: a query can be pasted into psql as
-- `prepare name as ...`, and every one is prepared by a test.


-- One row of values for tasklib.submit. Named arguments, so that the order here is nobody's business.
-- name: submit
select id, existed
from tasklib.submit(
    id => $1::uuid, name => $2::text, args => $3::jsonb, kwargs => $4::jsonb, queue => $5::text,
    priority => $6::integer, delay_seconds => $7::double precision, scheduled_at => $8::timestamptz,
    expires_at => $9::timestamptz, max_retries => $10::integer, timeout_seconds => $11::double precision,
    tags => $12::jsonb, idempotency_key => $13::text, store_result => $14::boolean, on_crash => $15::text);


-- name: submit_many
select ordinal, id, existed
from tasklib.submit_many($1::jsonb);


-- Columns in the order of tasklib.record.Task, here and in the two lists below; a test compares them.
-- name: get
select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
       retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
       queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
       error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
       resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents
from tasklib.tasks
where id = $1::uuid;


-- Newest first, by id: ids are time-ordered, and the primary key is the one index that is there
-- anyway. The page's start is a bound of the index scan also when there is none (a coalesce, not
-- an OR), so that page 1,000 costs as much as page 1. A rare name or tag is looked for through the
-- rows from the newest on; an index for each would be paid at every step of every task.
-- Two things keep it at that whatever the planner believes, which before the first ANALYZE was to
-- read and sort the whole table (0.9 s at a million rows, against 0.1 ms): the inner limit is a
-- literal, the most that may be asked for, since a parameter counts as a tenth of the table; and
-- the filters stand in one CASE, which counts as one half, while six guesses in a row come to
-- one row in a million.
-- name: list
select * from (
    select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
           retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
           queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
           error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
           resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents
    from tasklib.tasks
    where id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when ($2::text is null or state = $2::text)
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- The same for the states that only unsuccessful tasks have. A CHECK gives each of those an error
-- code, so that the few rows of the partial index are all there is to read, among any number of
-- completed ones.
-- name: list_unsuccessful
select * from (
    select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
           retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
           queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
           error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
           resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents
    from tasklib.tasks
    where error_code is not null
      and id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when state = $2::text
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;
