-- Statements about elections: which daemon runs the duties that are done once for all of them. The office is a row with a lease,
-- and not a session lock, because a lease ends by itself, whatever becomes of its holder's connection.


-- Stands for election, or renews the term. A row comes back for the holder only. While another daemon holds the row, nothing is
-- written and no row is locked, because all other daemons do this all day. The clock is read again when the row's lock is held. A
-- term of more than an hour does not count: the clock was set back, or the row was written by hand.
-- name: stand
insert into tasklib.elections as election (name, holder, term, until)
select $1::text, $2::text, 1, clock_timestamp() + $3::double precision * interval '1 second'
 where not exists (select from tasklib.elections
                    where name = $1::text and holder <> $2::text and until > clock_timestamp()
                      and until < clock_timestamp() + interval '1 hour')
on conflict (name) do update
    set holder = excluded.holder, until = clock_timestamp() + $3::double precision * interval '1 second',
        term = least(
            election.term + (election.holder <> excluded.holder or election.until < clock_timestamp())::integer,
            4611686018427387904)
    where election.holder = excluded.holder or election.until < clock_timestamp()
       or election.until > clock_timestamp() + interval '1 hour'
returning term;


-- Ends the holder's term at once, so that the next daemon need not wait.
-- name: resign
update tasklib.elections set until = clock_timestamp() where name = $1::text and holder = $2::text;
