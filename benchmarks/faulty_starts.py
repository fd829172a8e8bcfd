"""First and later starts on a card whose kernels are broken: what is replaced, and whether answers differ.

    python benchmarks/faulty_starts.py [MODEL] [--faults "nan:lone_bf16 compile:attend_chunk"] [--out FILE]

Four starts of `snugvl serve` on a GPU: without faults, first and again, then with them (`unseen_card/` has
their names), first and again. The cache folders of each pair are new. Printed of each: seconds until it was
ready, the kernels that `/health` names as replaced, what was compiled after ready. Fails if an answer with
faults is another one than without.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

import machine
from never_oom import environment, variables
from serving import serve

QUESTIONS = ("Why is the sky blue?", "How many shapes are there in a triangle?", "Say a colour.")


def start(model: str, options: list[str]) -> dict[str, Any]:
    """One start: seconds, kernels that are replaced, answers, kernels that were compiled after it."""
    with serve(model, options) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answers = [answered(http, question) for question in QUESTIONS]
        load, health = http.get("/memory").json()["load"], http.get("/health").json()
        return {
            "ready_s": server.ready_s, "replaced": health["replaced"], "answers": answers,
            "compiled_after_ready": load["kernel_compilations"],
        }  # fmt: skip


def answered(http: httpx.Client, question: str) -> str:
    """A greedy answer."""
    name = http.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": name,
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": question}],
    }
    text: str = (
        http.post("/v1/chat/completions", json=body)
        .raise_for_status()
        .json()["choices"][0]["message"]["content"]
    )
    return text


def main() -> None:
    """Start four times."""
    parser = machine.parser(__doc__)
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--faults", default="nan:lone_bf16 compile:attend_chunk")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    rows: list[dict[str, Any]] = []
    for faults in ("", given.faults):
        with tempfile.TemporaryDirectory() as folder:
            for life in ("first", "again"):
                with environment(**variables(folder, 0, untold=False), SNUGVL_FAULTS=faults):
                    found = start(given.model, ["--device", given.device])
                rows.append({"faults": faults, "life": life} | found)
                print(f"{faults or 'no faults'}, {life}: ready in {found['ready_s']:.1f} s, ", end="")
                print(f"{found['compiled_after_ready']} compiled after ready; ", end="")
                print(f"replaced: {json.dumps(found['replaced'])}", flush=True)
                machine.save("faulty_starts", {"starts": rows}, given.out)
    equal = all(row["answers"] == rows[0]["answers"] for row in rows)
    print("all answers are equal" if equal else "ANSWERS DIFFER")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
