"""LangChain's ChatOpenAI.

Packages: langchain-openai
Ran: a streamed conversation about a picture, a typed answer, a forced call and its answer
"""

import about
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="pocket", base_url=f"{about.SERVER}/v1", api_key="none", max_retries=0, stream_usage=True
)

history: list = [HumanMessage(about.openai_content(about.FIRST))]
chunks = list(model.stream(history))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
assert whole.usage_metadata is not None
assert whole.usage_metadata["output_tokens"] > 0
history += [whole, HumanMessage(about.SECOND)]
second = "".join(chunk.text for chunk in model.stream(history))

structured = model.with_structured_output({"title": "shape", **about.SCHEMA}, method="json_schema").invoke(
    [HumanMessage(about.openai_content(about.STRUCTURE))]
)

asked: list = [HumanMessage(about.openai_content(about.TOOL_QUESTION))]
answer = model.bind_tools([about.OPENAI_TOOL], tool_choice="any", parallel_tool_calls=False).invoke(asked)
call = answer.tool_calls[0]
asked += [answer, ToolMessage(about.TOOL_ANSWER, tool_call_id=call["id"])]
after = model.bind_tools([about.OPENAI_TOOL]).invoke(asked, max_tokens=20)

about.report(
    pieces=[chunk.text for chunk in chunks],
    second=second,
    structured=structured,
    call={"name": call["name"], "arguments": call["args"]},
    after=after.text,
)
