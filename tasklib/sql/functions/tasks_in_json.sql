-- The tasks of a JSON array as rows, with the defaults of what each leaves out, apart from what its function or its queue says.
-- PostgreSQL inlines it, because it is stable, is one SELECT, and has no SET clause. The domains refuse the same values as the
-- table, but do not log the whole row.
drop function if exists tasklib.tasks_in_json(jsonb, uuid[], timestamptz);  -- it had fewer columns
create function tasklib.tasks_in_json(tasks jsonb, ids uuid[], submitted_at timestamptz)
    returns table (
        ordinal bigint, id uuid, name text, kwargs jsonb, args jsonb, queue text, priority integer,
        scheduled_at timestamptz, due_at timestamptz, expires_at timestamptz, max_retries integer,
        timeout_seconds double precision, tags jsonb, idempotency_key text, store_result boolean, on_crash text,
        parent_id uuid, deadline_at timestamptz, audited boolean)
    language sql stable
as $$
    select ordinal, ids[ordinal], name, coalesce(kwargs, '{}'), coalesce(args, '{}'), coalesce(queue, 'default'),
           coalesce(priority, 0), starts_at,
           least(case when starts_at > submitted_at then starts_at end, expires_at, ends_by),
           expires_at, coalesce(max_retries, (otherwise ->> 'max_retries')::integer, 3),
           nullif(coalesce(timeout_seconds, (otherwise ->> 'timeout_seconds')::double precision),
                  double precision 'infinity')::tasklib.given_timeout, coalesce(tags, '{}'),
           idempotency_key, coalesce(store_result, true), on_crash, parent_id, ends_by::tasklib.moment, audited
      from rows from (pg_catalog.jsonb_to_recordset(tasks) as (
               name tasklib.given_name, kwargs jsonb, args jsonb, queue text, priority integer,
               delay_seconds double precision, scheduled_at timestamptz, expires_at timestamptz,
               max_retries tasklib.given_retries, timeout_seconds double precision, tags jsonb,
               idempotency_key text, store_result boolean, on_crash tasklib.given_crash_policy, parent_id uuid,
               deadline_at timestamptz, deadline_seconds tasklib.given_timeout, audited boolean, otherwise jsonb)
           ) with ordinality as element (
               name, kwargs, args, queue, priority, delay_seconds, scheduled_at, expires_at, max_retries,
               timeout_seconds, tags, idempotency_key, store_result, on_crash, parent_id, deadline_at, deadline_seconds,
               audited, otherwise, ordinal)
     cross join lateral (
         select coalesce(element.scheduled_at, submitted_at + coalesce(delay_seconds, 0) * interval '1 second'),
                least(element.deadline_at, submitted_at + deadline_seconds * interval '1 second')
     ) as times (starts_at, ends_by)
$$;
revoke all on function tasklib.tasks_in_json(jsonb, uuid[], timestamptz) from public;
