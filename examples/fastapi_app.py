"""A web application that submits tasks, and runs them beside the requests. With DATABASE_URL set:

tasklib migrate
uvicorn --app-dir examples fastapi_app:app
curl --json '{"customer": "alice"}' localhost:8000/orders
"""

# Annotations are real ones here: FastAPI reads them.

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import func, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import tasklib
from tasklib.fastapi import lifespan

URL = os.environ["DATABASE_URL"]
config = tasklib.Config(URL)
engine = create_async_engine(make_url(URL).set(drivername="postgresql+asyncpg"))
with_tasklib = lifespan(config, worker=tasklib.TaskWorker(config, concurrency=4, grace_seconds=20))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class NewOrder(BaseModel):
    customer: str


class Placed(BaseModel):
    order_id: int
    task_id: UUID


@tasklib.task
def confirm(order_id: int) -> str:
    return f"order {order_id} is confirmed"


@asynccontextmanager
async def everything(app: FastAPI) -> AsyncIterator[None]:
    """A lifespan of one's own, with tasklib's inside."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with with_tasklib(app):
        yield
    await engine.dispose()


app = FastAPI(lifespan=everything)


@app.post("/orders")
async def place_order(new: NewOrder) -> Placed:
    """Committed before the answer is sent: order and task, or neither."""
    async with AsyncSession(engine) as session, session.begin():
        order = Order(customer=new.customer)
        session.add(order)
        await session.flush()  # gives it its id
        task_id = await confirm.options(connection=session).submit(order.id)
        if new.customer == "nobody":
            raise HTTPException(409, "out of stock")
        return Placed(order_id=order.id, task_id=task_id)


@app.get("/orders")
async def count_orders() -> int:
    async with AsyncSession(engine) as session:
        return await session.scalar(select(func.count()).select_from(Order)) or 0


@app.get("/tasks/{task_id}")
async def look(task_id: UUID) -> dict[str, object]:
    task = await tasklib.get_task_async(task_id)
    if task is None:
        raise HTTPException(404, "no such task")
    return {"state": task.state, "result": task.result and task.result["value"]}
