"""Plans as tests see them: by which index a statement reaches a table, and how many pages it touched.

Statistics can be put aside and brought back, so that one filled database serves to try what the planner does when it
knows nothing, when it knows all, and when what it knows is out of date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tasklib.statements import Statement
    from tests.support.raw_sql import Conn

Node = dict[str, Any]
EVERYTHING = "everything"  # what a sequential scan reads
PLACE = "ctid"  # rows whose place in the table is known


class Plan:
    """A plan that was executed."""

    def __init__(self, root: Node) -> None:
        self._root = root

    @property
    def pages(self) -> int:
        """Touched by the whole statement: functions, triggers and writes too."""
        return _pages(self._root)

    def pages_of(self, table: str) -> int:
        """Touched by the scans of one table."""
        return sum(_pages(node) for node in self._scans(table))

    def ways_to(self, table: str) -> set[str]:
        """The indexes by which the table was reached."""
        return {way for node in self._scans(table) for way in _indexes(node)}

    @property
    def kinds(self) -> set[str]:
        return {node["Node Type"] for node in _nodes(self._root)}

    @property
    def sorted_rows(self) -> float:
        """The most that one of its sorts had to put in order."""
        sorts = (node for node in _nodes(self._root) if node["Node Type"] in ("Sort", "Incremental Sort"))
        return max((node["Actual Rows"] * node["Actual Loops"] for node in sorts), default=0)

    def _scans(self, table: str) -> Iterator[Node]:
        for node in _nodes(self._root):
            if node.get("Relation Name") == table and node["Node Type"].endswith("Scan"):
                yield node

    def __repr__(self) -> str:
        return "\n" + "\n".join(_lines(self._root))


def explain(conn: Conn, plan_mode: str, statement: Statement[Any]) -> Plan:
    """Runs a statement for real, and undoes it."""
    values = sql.SQL(", ").join(sql.Literal(value) for value in statement.parameters)
    call = sql.SQL("execute query({})").format(values) if statement.parameters else sql.SQL("execute query")
    conn.execute("deallocate all")
    conn.execute(literal(f"set plan_cache_mode = {plan_mode}"))
    conn.execute(literal(f"prepare query as {statement.sql}"))
    explained = sql.SQL("explain (analyze, buffers, timing off, format json) {}").format(call)
    # The cheapest of three runs counts: what a statement needs, it reads every time. A single run may read the catalog
    # too (the first one; any one after autovacuum or another session has invalidated the session's caches), or split
    # pages of indexes that earlier runs have filled.
    plans: list[Plan] = []
    for _ in range(3):
        with conn.transaction(force_rollback=True):
            (explanation,) = conn.execute(explained).fetchone() or ()
            plans.append(Plan(explanation[0]["Plan"]))
    return min(plans, key=lambda plan: plan.pages)


class Statistics:
    """What the planner knows about some tables, kept under names. Takes a superuser: the catalog is written to."""

    def __init__(self, conn: Conn, tables: Sequence[str]) -> None:
        self.conn = conn
        self._tables = list(tables)
        self._kept: dict[str, list[tuple[Any, ...]]] = {}

    def keep(self, name: str) -> None:
        """Take them now, and keep a copy."""
        for table in self._tables:
            self.conn.execute(literal(f"analyze {table}"))
        self._kept[name] = self._relations()
        # Rows of pg_statistic fit into no other table, but they can be said to be about another one.
        self._copy(0, self._place(name))

    def bring_back(self, name: str) -> None:
        self.forget()
        self._copy(self._place(name), 0)
        for oid, pages, rows in self._kept[name]:
            self.conn.execute("update pg_class set relpages = %s, reltuples = %s where oid = %s", [pages, rows, oid])

    def forget(self) -> None:
        """As before the first ANALYZE."""
        self.conn.execute("delete from pg_statistic where starelid = any(%s::regclass[]::oid[])", [self._tables])
        for oid, _, _ in self._relations():
            self.conn.execute("update pg_class set relpages = 0, reltuples = -1 where oid = %s", [oid])

    def _relations(self) -> list[tuple[Any, ...]]:
        return self.conn.execute(_RELATIONS, [self._tables]).fetchall()

    def _place(self, name: str) -> int:
        """Far above the ids of all tables."""
        return 100_000_000 * (1 + list(self._kept).index(name))

    def _copy(self, source: int, target: int) -> None:
        names = ", ".join(name for (name,) in self.conn.execute(_STATISTIC_COLUMNS))
        copy = f"""insert into pg_statistic (starelid, {names})
                   select (starelid::bigint + %s)::oid, {names} from pg_statistic
                    where starelid::bigint - %s = any(%s::regclass[]::oid[]::bigint[])"""
        self.conn.execute(literal(copy), [target - source, source, self._tables])


_STATISTIC_COLUMNS = """
select attname from pg_attribute
 where attrelid = 'pg_statistic'::regclass and attnum > 0 and attname <> 'starelid'
"""
_RELATIONS = """
with given as (select unnest(%s::text[])::regclass::oid as id)
select oid, relpages, reltuples from pg_class
 where oid in (select id from given) or oid in (select indexrelid from pg_index join given on indrelid = id)
"""


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _pages(node: Node) -> int:
    return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])


def _indexes(scan: Node) -> set[str]:
    """A bitmap scan has its indexes below it; other children are subqueries, with indexes of other tables."""
    if "Index Name" in scan:
        return {scan["Index Name"]}
    if scan["Node Type"] == "Tid Scan":
        return {PLACE}
    bitmaps = [child for child in scan.get("Plans", ()) if child["Node Type"].startswith("Bitmap")]
    return {name for bitmap in bitmaps for name in _indexes(bitmap)} or {EVERYTHING}


def _lines(node: Node, depth: int = 0) -> Iterator[str]:
    words = [node["Node Type"], node.get("Operation"), node.get("Relation Name"), node.get("Index Name")]
    text = " ".join(word for word in words if word)
    yield f"{'  ' * depth}{text} ({_pages(node)} pages, {node['Actual Rows']:g} rows x {node['Actual Loops']:g})"
    for child in node.get("Plans", ()):
        yield from _lines(child, depth + 1)
