"""Orders and the tasks that deal with them, committed together. With DATABASE_URL set:

tasklib migrate
python examples/sqlalchemy_app.py

A sync Session on psycopg first, then an AsyncSession on asyncpg. The tasks are run at the end.
"""

from __future__ import annotations

import asyncio
import os

from sqlalchemy import create_engine, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tasklib

URL = os.environ["DATABASE_URL"]
config = tasklib.Config(URL)
tasklib.init(config)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class OutOfStock(Exception):
    pass


@tasklib.task
def confirm(order_id: int) -> str:
    return f"order {order_id} is confirmed"


def place_order(session: Session, customer: str) -> None:
    order = Order(customer=customer)
    session.add(order)
    session.flush()  # gives it its id
    confirm.options(connection=session).submit_sync(order.id)
    if customer == "nobody":
        raise OutOfStock


async def place_order_async(session: AsyncSession, customer: str) -> None:
    order = Order(customer=customer)
    session.add(order)
    await session.flush()
    await confirm.options(connection=session).submit(order.id)
    if customer == "nobody":
        raise OutOfStock


def sell() -> None:
    engine = create_engine(make_url(URL).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    for customer in ("alice", "nobody"):
        try:
            with Session(engine) as session, session.begin():
                place_order(session, customer)
        except OutOfStock:
            print(f"{customer}: rolled back, the order and its task")
    with Session(engine) as session:
        show("sync", session.scalar(select(func.count()).select_from(Order)), tasklib.list_tasks())
    engine.dispose()


async def sell_async() -> None:
    engine = create_async_engine(make_url(URL).set(drivername="postgresql+asyncpg"))
    for customer in ("bob", "nobody"):
        try:
            async with AsyncSession(engine) as session, session.begin():
                await place_order_async(session, customer)
        except OutOfStock:
            print(f"{customer}: rolled back, the order and its task")
    async with AsyncSession(engine) as session:
        orders = await session.scalar(select(func.count()).select_from(Order))
    show("async", orders, await tasklib.list_tasks_async())
    await engine.dispose()


def show(what: str, orders: int | None, tasks: list[tasklib.Task]) -> None:
    print(f"{what}: {orders} order(s), {len(tasks)} task(s)")


def main() -> None:
    sell()
    asyncio.run(sell_async())
    tasklib.TaskWorker(config).run_until_empty_sync()
    for task in reversed(tasklib.list_tasks()):
        print(f"{task.state}: {task.result and task.result['value']}")


if __name__ == "__main__":
    main()
