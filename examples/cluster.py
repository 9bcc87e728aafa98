"""Three replicas behind one gateway, asked by OpenAI's own client: `make cluster-demo`.

Shows where each request went and what it reused; then a replica is killed, and comes back.
docs/scale-out.md says what to know before running this for real.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import openai
from rich.console import Console
from rich.table import Table

from benchmarks._gateway import STRICT, Gateway, free_port, gateway
from prefixcache_service import Client

FLAGS = ("--no-http", "--log-level", "error", "--num-threads", "1", "--grace", "5")
POOL = ("--max-model-len", "2048", "--num-gpu-blocks-override", "512")
HEALTH = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", *STRICT)
ROLES = {
    "museum": "You are the guide of a small museum of seafaring. ",
    "kitchen": "You are a patient cook who explains recipes. ",
    "garden": "You are a gardener who knows every kind of apple. ",
    "workshop": "You repair bicycles and explain what you do. ",
}
NEWCOMER = "library"
RULES = "Answer in one short sentence, and never invent anything. " * 8
QUESTIONS = ("What do you do all day?", "What should I know first?", "Who taught you?")
ANSWER_TOKENS = 12


class Replica:
    """One server, in a process of its own, which can be killed and started again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.target = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """Begin to start it."""
        code = "from prefixcache_service.cli import main; main()"
        port = self.target.partition(":")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", port, *FLAGS, *POOL],
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until it serves."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            sys.exit(f"replica {self.name} did not start; its message is above")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Replica":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def prompt_tokens(self) -> int:
        """Prompt tokens that it has taken so far."""
        with Client(self.target, timeout=60) as client:
            return client.stats().prompt_tokens


@dataclass
class Tour:
    """Asks through the gateway, and finds out who answered."""

    front: Gateway
    replicas: Sequence[Replica]
    alive: set[str] = field(default_factory=set)
    table: Table = field(default_factory=lambda: Table("asked for", "replica", *NUMBERS))

    def __post_init__(self) -> None:
        self.alive = {replica.name for replica in self.replicas}
        self._client = openai.OpenAI(base_url=f"{self.front.url}/v1", api_key="none")
        self._model = next(iter(self._client.models.list())).id

    def ask(self, role: str, question: str) -> tuple[str, int]:
        """One chat; the name of the replica that answered, and prompt tokens that it reused."""
        before = self._counts()
        began = time.perf_counter()
        reply = self._client.chat.completions.create(
            model=self._model, messages=chat(role, question), max_tokens=ANSWER_TOKENS
        )
        seconds = time.perf_counter() - began
        after = self._counts()
        (name,) = [name for name, count in after.items() if count > before[name]]
        assert reply.usage is not None
        details = reply.usage.prompt_tokens_details
        reused = (details.cached_tokens if details else None) or 0
        numbers = (str(reply.usage.prompt_tokens), str(reused), f"{seconds:.2f}")
        self.table.add_row(f"{role}: {question}", name, *numbers)
        return name, reused

    def _counts(self) -> dict[str, int]:
        alive = [replica for replica in self.replicas if replica.name in self.alive]
        return {replica.name: replica.prompt_tokens() for replica in alive}

    def event(self, text: str) -> None:
        """A line of its own in the table."""
        self.table.add_section()
        self.table.add_row(f"[bold]{text}[/bold]")


NUMBERS = ("prompt tokens", "reused", "seconds")


def chat(role: str, question: str) -> list[dict[str, str]]:
    """Messages whose beginning is all of a role's own."""
    system = ROLES.get(role, f"You work in a {role}. ") + RULES
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@contextmanager
def cluster() -> Iterator[Tour]:
    """Three replicas and a gateway, all ready."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(Replica(name)) for name in "ABC"]
        for replica in replicas:
            replica.wait()
        front = stack.enter_context(gateway([r.target for r in replicas], *HEALTH))
        yield Tour(front, replicas)


def require(what: bool, otherwise: str) -> None:
    """Leave with an error where the demo does not show what it is to show."""
    if not what:
        sys.exit(f"the demo failed: {otherwise}")


def show(tour: Tour) -> None:
    """The requests."""
    put = tour.replicas[2]
    tour.event(f"a prompt is put into {put.name} through our own API")
    with Client(put.target, timeout=60) as client:
        client.generate(chat("museum", QUESTIONS[0]), max_tokens=0)
    homes = {"museum": put.name}
    tour.event("four conversations take turns")
    for question in QUESTIONS:
        for role in ROLES:
            name, reused = tour.ask(role, question)
            known = role in homes
            require(not known or reused > 0, f"nothing was reused for {role}")
            require(homes.setdefault(role, name) == name, f"{role} went astray to {name}")

    victim = next(r for r in tour.replicas if r.name == homes["museum"])
    tour.event(f"{victim.name} is killed")
    victim.kill()
    tour.alive.remove(victim.name)
    for question in QUESTIONS[:2]:
        homes["museum"], _ = tour.ask("museum", question)
        require(homes["museum"] != victim.name, "a dead replica cannot answer")

    tour.event(f"{victim.name} is started again, and a prompt is put into it")
    victim.start()
    victim.wait()
    tour.front.wait([replica.target for replica in tour.replicas])
    tour.alive.add(victim.name)
    with Client(victim.target, timeout=60) as client:
        client.generate(chat(NEWCOMER, QUESTIONS[0]), max_tokens=0)
    name, reused = tour.ask(NEWCOMER, "What is new?")
    require(name == victim.name and reused > 0, f"{victim.name} is passed over")
    for role in ROLES:
        _, reused = tour.ask(role, "What is new?")
        lost = homes[role] == victim.name
        require(lost or reused > 0, f"nothing was reused for {role}")


def main() -> None:
    """Run the demo."""
    console = Console(width=100)
    console.print("starting three replicas and a gateway …")
    with cluster() as tour:
        show(tour)
    console.print(tour.table)


if __name__ == "__main__":
    main()
