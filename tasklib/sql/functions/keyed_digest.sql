-- The digest that is stored with an idempotency key: of the payload, and of the role that submitted it. See
-- submitted_before.
create or replace function tasklib.keyed_digest(payload bytea) returns bytea
    language sql stable
as $$
    select pg_catalog.sha256(
        payload operator(pg_catalog.||) pg_catalog.convert_to(tasklib.caller()::pg_catalog.text, 'UTF8'))
$$;
