"""The official client against a real fleet: every stream ends, every text is its own adapter's, usage is right."""

import asyncio
from dataclasses import dataclass

import openai
import pytest

from tests.tiny_fleet import ADAPTERS, TinyFleet

pytestmark = pytest.mark.serve
MAX_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


async def complete(client: openai.AsyncOpenAI, model: str, prompt: str) -> Answer:
    response = await client.completions.create(model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
    assert response.model == model
    assert response.usage is not None
    choice = response.choices[0]
    return Answer(choice.text, response.usage.prompt_tokens, response.usage.completion_tokens, choice.finish_reason)


async def complete_streamed(client: openai.AsyncOpenAI, model: str, prompt: str) -> Answer:
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finish_reason, usage = "", None, None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finish_reason = choice.finish_reason or finish_reason
        usage = chunk.usage or usage
    assert usage is not None
    assert finish_reason is not None
    return Answer(text, usage.prompt_tokens, usage.completion_tokens, finish_reason)


async def test_32_concurrent_requests_over_5_adapters_each_get_their_own_text(tiny_fleet: TinyFleet) -> None:
    models = [*ADAPTERS, None]
    jobs = [(models[index % len(models)], f"Prompt number {index % 11}:", index % 2 == 0) for index in range(32)]
    base = await base_name(tiny_fleet)
    async with openai.AsyncOpenAI(base_url=f"{tiny_fleet.fleet.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                (complete_streamed if streamed else complete)(client, model or base, prompt)
                for model, prompt, streamed in jobs
            )
        )
    for (model, prompt, _), answer in zip(jobs, answers, strict=True):
        text, num_tokens = tiny_fleet.greedy_text(model, prompt, MAX_TOKENS)
        assert answer.text == text, (model, prompt)
        assert answer.completion_tokens == num_tokens
        assert answer.prompt_tokens == len(prompt.encode())
        assert answer.finish_reason == ("length" if num_tokens == MAX_TOKENS else "stop")
    texts = {tiny_fleet.greedy_text(model, "Prompt number 1:", MAX_TOKENS)[0] for model in models}
    assert len(texts) == len(models), "the adapters must differ for this test to mean anything"


async def test_chat_streams_what_it_answers_whole(tiny_fleet: TinyFleet) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]
    async with openai.AsyncOpenAI(base_url=f"{tiny_fleet.fleet.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(
            model="beta", messages=messages, max_tokens=MAX_TOKENS, temperature=0
        )
        stream = await client.chat.completions.create(
            model="beta", messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == whole.choices[0].message.content


async def test_n_choices_stream_with_their_own_index(tiny_fleet: TinyFleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny_fleet.fleet.url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="alpha", prompt="Hm", n=4, max_tokens=8, temperature=1.0, seed=7, stream=True
        )
        finished, texts = set(), dict.fromkeys(range(4), "")
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason is not None:
                    finished.add(choice.index)
        whole = await client.completions.create(model="alpha", prompt="Hm", n=4, max_tokens=8, temperature=1.0, seed=7)
    assert finished == {0, 1, 2, 3}
    assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_models_lists_base_and_adapters(tiny_fleet: TinyFleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny_fleet.fleet.url}/v1", api_key="none") as client:
        names = {model.id async for model in client.models.list()}
    assert names >= {*ADAPTERS, await base_name(tiny_fleet)}


async def test_unknown_model_is_404_and_never_the_base(tiny_fleet: TinyFleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{tiny_fleet.fleet.url}/v1", api_key="none") as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="alfa", prompt="x", max_tokens=1)
    assert caught.value.code == "model_not_found"


async def base_name(tiny_fleet: TinyFleet) -> str:
    return tiny_fleet.base.name
