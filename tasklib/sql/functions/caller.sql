-- The role that asks, also within a function with its owner's rights: the one it has set, or else its login's. No SET
-- clause, so that it is inlined.
create or replace function tasklib.caller() returns name
    language sql stable
as $$
    select case when pg_catalog.current_setting('role') operator(pg_catalog.=) 'none' then session_user
                else pg_catalog.current_setting('role')::pg_catalog.name end
$$;
