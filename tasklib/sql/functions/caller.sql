-- The role of the caller, even inside a function that runs with its owner's rights: the role that was set, or else that of
-- the login. There is no SET clause, so that PostgreSQL can inline the function.
create or replace function tasklib.caller() returns name
    language sql stable
as $$
    select case when pg_catalog.current_setting('role') operator(pg_catalog.=) 'none' then session_user
                else pg_catalog.current_setting('role')::pg_catalog.name end
$$;
