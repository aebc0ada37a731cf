"""The real base and the example adapters: mixed greedy texts equal transformers' own, on HTTP, in one process."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.messages import GenerateRequest, SamplingParams
from tests.local_fleet import local_fleet
from tests.tiny_models import load_peft

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TENANTS = ("legal", "support", "pirate", "sql", "summary")
PROMPTS_EACH = 4
NUM_TOKENS = 64
FEW_TOKENS = 24

pytestmark = [pytest.mark.base, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::FutureWarning")]


def golden_messages(tenant: str) -> Iterator[list[dict[str, str]]]:
    lines = (EXAMPLES / "data" / tenant / "golden.jsonl").read_text().splitlines()
    for line in lines[:PROMPTS_EACH]:
        yield [message for message in json.loads(line)["messages"] if message["role"] != "assistant"]


@torch.inference_mode()
def greedy(model: Any, prompt: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The ids that transformers' own `generate` adds with the adapter."""
    output: torch.Tensor = model.generate(input_ids=prompt, max_new_tokens=num_tokens, do_sample=False)
    return output[0, prompt.shape[1] :]


@torch.inference_mode()
def is_greedy(model: Any, prompt: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether each new id is the model's first choice after those before it: `generate` in one forward."""
    ids = torch.cat([prompt, new[None]], dim=1)
    logits = model(input_ids=ids).logits[0, prompt.shape[1] - 1 : -1]
    return bool((logits.argmax(-1) == new).all())


@dataclass(frozen=True)
class Answer:
    prompt: torch.Tensor
    new: torch.Tensor
    text: str | None
    """What HTTP said, where it was asked."""


async def mixed_answers(base: Path, folder: Path, asked_by_http: int, num_tokens: int) -> dict[str, list[Answer]]:
    """All prompts of all tenants at once on one replica with fewer slots than adapters, by tenant."""
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), name="base", device="cpu", num_threads=2),
        adapters=AdapterCacheConfig(max_slots=3),
        scheduler=SchedulerConfig(max_num_seqs=10, max_batch_tokens=128),
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    async with local_fleet(folder, config, num_replicas=1) as fleet, fleet.client() as client:
        for tenant in TENANTS:
            await fleet.push(tenant, EXAMPLES / "adapters" / tenant)

        async def chat(tenant: str, messages: list[dict[str, str]]) -> str:
            body = {"model": tenant, "messages": messages, "max_tokens": num_tokens, "temperature": 0}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["message"]["content"]
            return text

        async def answer(tenant: str, number: int, messages: list[dict[str, str]]) -> Answer:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            digest = fleet.gateway.catalog.resolve("default", tenant).digest
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0)
            request = GenerateRequest(f"{tenant}-{number}", "default", digest, tuple(prompt[0].tolist()), sampling)
            chunks = [chunk async for batch in fleet.replicas["replica-0"].generate(request) for chunk in batch]
            new = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids])
            return Answer(prompt, new, await chat(tenant, messages) if number < asked_by_http else None)

        jobs = [
            (tenant, number, messages) for tenant in TENANTS for number, messages in enumerate(golden_messages(tenant))
        ]
        assert len(jobs) == len(TENANTS) * PROMPTS_EACH
        interleaved = [jobs[(index * 7) % len(jobs)] for index in range(len(jobs))]
        answers = await asyncio.gather(*(answer(*job) for job in interleaved))
        fleet.check_integrity()
    by_job = {job[:2]: answer for job, answer in zip(interleaved, answers, strict=True)}
    return {tenant: [by_job[tenant, number] for number in range(PROMPTS_EACH)] for tenant in TENANTS}


async def check(base: Path, folder: Path, num_generated: int, num_tokens: int) -> None:
    """Every answer is the adapter's greedy one; of each tenant's, `num_generated` are held against `generate`."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    for tenant, answers in (await mixed_answers(base, folder, num_generated, num_tokens)).items():
        model = load_peft(base, EXAMPLES / "adapters" / tenant)
        for answer in answers:
            assert is_greedy(model, answer.prompt, answer.new), (tenant, tokenizer.decode(answer.new))
            if answer.text is not None:
                assert answer.text == tokenizer.decode(
                    greedy(model, answer.prompt, num_tokens), skip_special_tokens=True
                )


async def test_20_mixed_greedy_answers_are_the_adapters_own(real_base: Path, tmp_path: Path) -> None:
    await check(real_base, tmp_path, num_generated=1, num_tokens=FEW_TOKENS)


@pytest.mark.soak
async def test_20_mixed_greedy_answers_equal_generate(real_base: Path, tmp_path: Path) -> None:
    await check(real_base, tmp_path, num_generated=PROMPTS_EACH, num_tokens=NUM_TOKENS)
