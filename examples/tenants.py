"""Serve two tenants: each has a key, one has a limit, and the ledger says what each has used."""

import subprocess
import sys
import tempfile
from pathlib import Path

from demo_server import demo_server
from openai import OpenAI, RateLimitError


def admin(database: str, *arguments: str) -> str:
    """Output of `outrider admin`, which works on the database itself."""
    command = [sys.executable, "-m", "outrider.platform.cli.main", "admin", *arguments, "--database", database]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def ask(address: str, key: str, adapter: str) -> str:
    """Answer of an adapter to one question, asked with a tenant's key."""
    with OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=adapter, messages=[{"role": "user", "content": "List all products."}], max_tokens=32, temperature=0
        )
    return answer.choices[0].message.content or ""


def main() -> None:
    """Make tenants and keys, ask for both, and print the usage."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{Path(folder) / 'outrider.db'}"
        admin(database, "database", "upgrade")
        admin(database, "tenant", "create", "acme")
        admin(database, "tenant", "create", "trial", "--requests-per-minute", "2")
        keys = {name: admin(database, "key", "create", "--tenant", name) for name in ("acme", "trial")}
        with demo_server("--database", database, "--scheduling-policy", "fair") as address:
            for name, key in keys.items():
                for number in range(3):
                    try:
                        print(f"{name} {number + 1}: {ask(address, key, 'sql')}")
                    except RateLimitError as error:
                        print(f"{name} {number + 1}: refused, {error.body['param']}")
        print(admin(database, "usage", "--by", "tenant,adapter"))


if __name__ == "__main__":
    main()
