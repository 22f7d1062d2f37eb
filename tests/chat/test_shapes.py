"""Rows as public datasets and tools have them: which messages they become, which are trained on, and what is counted."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.shapes import KNOWN, METADATA, fields_read, given_of, shape_name
from tokenmill.tasks.chat.tokenized import tokenized
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import read_records

CALL = {"name": "f", "arguments": {"x": 1}}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
WRAPPED = {"type": "function", "function": TOOL}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def turn(speaker, value, **more):
    return {"from": speaker, "value": value, **more}


def system(content="s"):
    return said("system", content)


def user(content="q"):
    return said("user", content)


def answer(content="a", **more):
    return said("assistant", content, **more)


def calls(content=None, **more):
    return answer(content, tool_calls=[{"type": "function", "function": CALL, **more}])


def result(content="r", **more):
    return said("tool", content, **more)


def part(text):
    return [{"type": "text", "text": text}]


TALK, TURNS = [user(), answer()], [turn("human", "q"), turn("gpt", "a")]
THOUGHT = answer(reasoning_content="t")
UNTRAINED = answer(trained=())

HF = "https://huggingface.co/datasets/"
FACTORY = "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md"
SWIFT = "https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html"
AXOLOTL = "https://docs.axolotl.ai/docs/dataset-formats/"
TRL = "https://huggingface.co/docs/trl/dataset_formats"
HARMONY = "https://cookbook.openai.com/articles/openai-harmony"
ANTHROPIC = "https://docs.anthropic.com/en/docs/agents-and-tools/tool-use"
LANGCHAIN = "https://python.langchain.com/api_reference/core/messages.html"
OPENROUTER = "https://openrouter.ai/docs/use-cases/reasoning-tokens"
OPENAI = "https://platform.openai.com/docs/guides/supervised-fine-tuning"

READ = [
    # lists of messages: source, row, messages, what isn't read
    (OPENAI, {"messages": TALK}, TALK, ()),
    (OPENAI, {"messages": [user(), answer(weight=0), user(), answer(weight=1)]}, [user(), UNTRAINED, *TALK], ()),
    (OPENAI, {"messages": [said("developer", "s"), *TALK]}, [said("developer", "s"), *TALK], ()),
    (OPENAI, {"messages": [user(), answer(refusal="no")]}, TALK, ("messages.refusal",)),
    (OPENAI, {"messages": [user(), answer(None, function_call={"name": "f", "arguments": '{"x": 1}'}), said("function", "r", name="f")],
              "functions": [TOOL]}, [user(), calls(), result(name="f")], ()),
    (OPENAI, {"messages": [user(), answer(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]),
                           result(tool_call_id="1"), answer()], "tools": [WRAPPED], "parallel_tool_calls": False},
     [user(), calls(id="1"), result(tool_call_id="1"), answer()], ()),
    (HF + "HuggingFaceH4/ultrachat_200k", {"prompt": "q", "prompt_id": "1", "messages": TALK}, TALK, ("prompt",)),
    (HF + "HuggingFaceH4/no_robots", {"prompt": "q", "prompt_id": "1", "messages": TALK, "category": "Chat"}, TALK, ("prompt",)),
    (HF + "allenai/tulu-3-sft-mixture", {"id": "1", "messages": TALK, "source": "x"}, TALK, ()),
    (HF + "allenai/Dolci-Instruct-SFT", {"messages": [said("system", "s", functions=json.dumps([TOOL]), function_calls=None), said("user", "q", function_calls=None),
                                                      answer(None, function_calls=json.dumps([CALL])), said("environment", "r")]},
     [system(), user(), calls(), result()], ()),
    ("https://huggingface.co/docs/transformers/chat_extras", {"messages": TALK, "documents": [{"title": "t", "text": "x"}]}, TALK, ("documents",)),
    (HF + "HuggingFaceTB/smoltalk2", {"messages": TALK, "chat_template_kwargs": {}, "source": "x"}, TALK, ()),
    (HF + "nvidia/Nemotron-Post-Training-Dataset-v2", {"uuid": "1", "messages": TALK, "reasoning": "on", "category": "math", "metadata": "{}"}, TALK, ()),
    (HF + "AI-MO/NuminaMath-CoT", {"source": "x", "problem": "q", "solution": "a", "messages": TALK}, TALK, ("problem", "solution")),
    (HF + "open-r1/OpenR1-Math-220k", {"problem": "q", "solution": "a", "answer": "4", "messages": TALK, "generations": ["a"]}, TALK,
     ("answer", "generations", "problem", "solution")),
    (HF + "HuggingFaceH4/Multilingual-Thinking", {"reasoning_language": "French", "messages": [said("system", "s", thinking=None), user(), answer(thinking="t")]},
     [system(), user(), THOUGHT], ()),
    (HF + "allenai/WildChat-1M", {"conversation_hash": "1", "model": "m", "conversation": [{**user(), "language": "en", "redacted": False, "toxic": False}, answer()],
                                  "turn": 1, "language": "en", "toxic": False}, TALK, ()),
    (HF + "lmsys/lmsys-chat-1m", {"conversation_id": "1", "model": "m", "conversation": TALK, "turn": 1, "redacted": False}, TALK, ()),
    (HF + "Agent-Ark/Toucan-1.5M", {"uuid": "1", "subset_name": "x", "messages": json.dumps(TALK), "question": "q", "available_tools": json.dumps([WRAPPED]),
                                    "target_tools": "f", "question_quality_assessment": "{}", "response_quality_assessment": "{}", "metadata": "{}"},
     TALK, ("question", "target_tools")),
    (HF + "MaziyarPanahi/SYNTHETIC-1-800K", {"response_id": "1", "problem_id": "1", "source": "x", "in_source_id": "1", "hf_dataset_name": "x", "task_type": "x", "prompt": "q",
                                             "gold_standard_solution": "g", "llm_response": "a", "verification_info": "{}", "score": 1.0, "messages": TALK},
     TALK, ("gold_standard_solution", "llm_response", "prompt")),
    (HF + "qforge/AsyncTool", {"messages": [user(), answer("", reasoning="t", tool_calls=[{"id": "1", **CALL}])], "available_tools": [TOOL], "meta": {}},
     [user(), {**calls("", id="1"), "reasoning_content": "t"}], ()),
    (HF + "lucaelin/glaive-function-calling-v2", {"messages": json.dumps(TALK), "tools": json.dumps([TOOL]), "response_format": "{}"}, TALK, ("response_format",)),
    (HF + "ai2-adapt-dev/interactive_tool_use_gpt4o", {"id": "1", "messages": [said("system", "s", functions=json.dumps([TOOL])), user(),
                                                                               answer(None, function_calls=json.dumps([CALL]))], "source": "x", "interaction_type": "x"},
     [system(), user(), calls()], ()),
    (HF + "PrimeIntellect/INTELLECT-3-SFT", {"source": "x", "prompt": [said("user", "q", tool_calls=None)], "completion": [answer(tool_calls=None)]}, TALK, ()),
    (HF + "hubertmarek/mistral-large-agent-diff-sft", {"prompt": [user()], "tools": json.dumps([TOOL]), "completion": [answer(None, tool_calls=[{
        "function": {"arguments": '{"x": 1}', "name": "f"}, "id": "1", "index": 0, "type": "function"}])]}, [user(), calls(id="1")], ()),
    (HF + "nvidia/When2Call", {"tools": [json.dumps(TOOL)], "messages": TALK}, TALK, ()),
    (HF + "a-m-team/AM-DeepSeek-R1-Distilled-1.4M", {"messages": [said("user", "q", info={"source": "x"}), answer(info={"think_content": "t", "answer_content": "a"})]}, TALK, ()),
    (HF + "open-r1/codeforces-cots", {"id": "1", "title": "x", "description": "x", "prompt": "q", "generation": "a", "finish_reason": "stop", "messages": TALK}, TALK,
     ("generation", "prompt")),
    (HF + "skytliang/s1K-1.1", {"solution": "b", "question": "q", "cot_type": "math", "deepseek_attempt": "a", "messages": TALK}, TALK, ("deepseek_attempt", "question", "solution")),
    ("https://docs.anthropic.com/en/api/messages#thinking", {"messages": [user(), answer([{"type": "thinking", "thinking": "t", "signature": "x"}, *part("a")])]}, [user(), THOUGHT], ()),
    ("https://docs.mistral.ai/capabilities/reasoning", {"messages": [user(), answer([{"type": "thinking", "thinking": part("t")}, *part("a")])]}, [user(), THOUGHT], ()),
    ("https://docs.aws.amazon.com/nova/latest/userguide/fine-tune-prepare-data-understanding.html",
     {"schemaVersion": "bedrock-conversation-2024", "messages": [said("user", [{"text": "q"}]), answer([{"text": "a"}])]}, TALK, ()),
    ("https://docs.cohere.com/docs/preambles", {"preamble": "s", "messages": TALK}, [system(), *TALK], ()),
    ("https://ai.google.dev/gemini-api/docs/system-instructions", {"systemPrompt": "s", "prompt": "q", "response": "a"}, [system(), *TALK], ()),
    ("https://docs.cohere.com/docs/chat-preparing-the-data", {"messages": [said("System", "s"), said("User", "q"), said("Chatbot", "a")]}, [system(), *TALK], ()),
    (HF + "HuggingFaceH4/ultrafeedback_binarized", {"prompt": "q", "chosen": TALK, "rejected": TALK, "messages": TALK}, TALK, ("chosen", "prompt", "rejected")),
    (HF + "SWE-Gym/OpenHands-SFT-Trajectories", {"messages": [said("system", part("s")), said("user", part("q")), answer(part("a"))]}, [system(), *TALK], ()),
    (HF + "SWE-bench/SWE-smith-trajectories", {"messages": json.dumps(TALK), "instance_id": "1", "resolved": True, "patch": "p"}, TALK, ()),
    (HF + "nvidia/SWE-Zero-openhands-trajectories", {"trajectory": [user(), answer("", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]),
                                                                    result(name="f", tool_call_id="1")]},
     [user(), calls("", id="1"), result(name="f", tool_call_id="1")], ()),
    (TRL, {"messages": [said("user", part("q")), answer(part("a"))]}, TALK, ()),
    (TRL, {"messages": TALK, "input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]}, TALK, ("input_ids",)),
    ("https://github.com/thinking-machines-lab/tinker-cookbook", {"messages": [user(), answer(trainable=False), user(), answer(trainable=True)]},
     [user(), UNTRAINED, *TALK], ()),
    (SWIFT, {"messages": [user(), answer(loss=False), user(), answer(loss=True)]}, [user(), UNTRAINED, *TALK], ()),
    (SWIFT, {"messages": TALK, "rejected_response": "no"}, TALK, ("rejected_response",)),
    (SWIFT, {"tools": json.dumps([WRAPPED]), "messages": [user(), said("tool_call", json.dumps(CALL)), said("tool_response", "r"), answer()]},
     [user(), calls(), result(), answer()], ()),
    (SWIFT, {"messages": [user(), answer(), said("tool_call", json.dumps(CALL)), said("tool_call", json.dumps(CALL))]},
     [user(), answer(tool_calls=calls()["tool_calls"] * 2)], ()),
    (SWIFT, {"system": "s", "messages": TALK}, [system(), *TALK], ()),
    (SWIFT, {"system": "s", "conversation": [{"human": "q", "assistant": "a"}, {"human": "q", "assistant": "a"}]}, [system(), *TALK, *TALK], ()),
    ("https://ai.google.dev/gemma/docs/core/prompt-structure", {"messages": [user(), said("model", "a")]}, TALK, ()),
    ("https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1", {"messages": [user(), answer(), said("ipython", "r"), answer()]},
     [user(), answer(), result(), answer()], ()),
    ("https://docs.anthropic.com/en/api/messages", {"system": "s", "messages": [said("user", part("q")), answer(part("a"))]}, [system(), *TALK], ()),
    ("https://github.com/NVIDIA/NeMo-RL/blob/main/docs/guides/sft.md", {"messages": [system(), *TALK], "system": "s"}, [system(), *TALK], ()),
    (AXOLOTL + "conversation.html", {"messages": [user(), answer(train=False), user(), answer()]}, [user(), UNTRAINED, *TALK], ()),
    (HF + "neginr/OT_temp2", {"system": "s", "conversations": [turn("user", "q"), turn("assistant", "a")]}, [system(), *TALK], ()),
    (HF + "beyoru/api_5k_parse_qwen", {"conversations": TURNS, "tools": json.dumps([TOOL]), "system": "s", "text": "…"}, [system(), *TALK], ()),
    (HF + "zuom/Bespoke-Stratos-17k-qa-only", {"system": "s", "conversations": TURNS, "answer": "4", "answer_type": "x"}, [system(), *TALK], ("answer",)),
    (HF + "mlfoundations-dev/nemo_nano_code_10k", {"input": "q", "output": "a", "category": "code", "license": "x", "reasoning": "on", "generator": "x", "used_in_training": "yes",
                                                   "version": "v1", "system_prompt": "s", "conversations": TURNS}, [system(), *TALK], ("input", "output")),
    (HF + "mlfoundations-dev/unverified_stratos_mix_no_proofs_without_metadata", {"system": "s", "conversations": TALK}, [system(), *TALK], ()),
    (HF + "Locutusque/function-calling-chatml", {"system_message": "s", "function_description": "d", "conversations": [
        turn("human", "q"), turn("function-call", json.dumps(CALL)), turn("function-response", "r"), turn("gpt", "a")]},
     [system(), user(), calls(), result(), answer()], ("function_description",)),
    (HF + "KodCode/KodCode-V1-SFT-R1", {"style": "x", "question_id": "1", "question": "q", "solution": "b", "test_code": "x", "r1_solution": "b", "conversations": TURNS},
     TALK, ("question", "r1_solution", "solution")),
    (HF + "openchat/openchat_sharegpt4_dataset", {"id": "1", "items": TURNS}, TALK, ()),
    (HF + "arcee-ai/The-Tome", {"conversations": TURNS, "dataset": "x"}, TALK, ()),
    # messages of other APIs
    (ANTHROPIC, {"system": "s", "messages": [user(), answer([*part("d"), {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]),
                                             user([{"type": "tool_result", "tool_use_id": "1", "content": part("r")}, *part("q")]), answer(part("a"))],
                 "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"], "cache_control": None}]},
     [system(), user(), calls("d", id="1"), result(tool_call_id="1"), *TALK], ()),
    (ANTHROPIC, {"messages": [user(), answer([{"type": "thinking", "thinking": "t", "signature": "x"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                                              {"type": "tool_use", "id": "2", "name": "f", "input": {"x": 1}}]),
                              user([{"type": "tool_result", "tool_use_id": "1", "content": "r"}, {"type": "tool_result", "tool_use_id": "2", "is_error": True}]), answer()]},
     [user(), {**answer("", tool_calls=[*calls(id="1")["tool_calls"], *calls(id="2")["tool_calls"]]), "reasoning_content": "t"},
      result(tool_call_id="1"), result("", tool_call_id="2"), answer()], ()),
    (LANGCHAIN, {"messages": [
        {"type": "system", "data": {"content": "s", "additional_kwargs": {}, "type": "system"}}, {"type": "human", "data": {"content": "q", "type": "human", "example": False}},
        {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "f", "args": {"x": 1}, "id": "1", "type": "tool_call"}], "invalid_tool_calls": [], "type": "ai"}},
        {"type": "tool", "data": {"content": "r", "tool_call_id": "1", "name": "f", "type": "tool"}}, {"type": "ai", "data": {"content": "a", "tool_calls": [], "type": "ai"}}]},
     [system(), user(), calls("", id="1"), result(tool_call_id="1", name="f"), answer()], ()),
    (LANGCHAIN, {"messages": [{"type": "human", "content": "q"}, {"type": "ai", "content": [*part("d"), {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}],
                                                                  "tool_calls": [{"name": "f", "args": {"x": 1}, "id": "1"}]},
                              {"type": "tool", "content": "r", "tool_call_id": "1"}]}, [user(), calls("d", id="1"), result(tool_call_id="1")], ()),
    (LANGCHAIN, {"messages": [{"type": "human", "data": {"content": "q"}}, {"type": "ai", "data": {"content": "", "additional_kwargs": {
        "function_call": {"name": "f", "arguments": '{"x": 1}'}}}}]}, [user(), calls("")], ()),
    ("author", {"messages": [{"author": "system", "content": "s"}, {"author": "human", "content": "q"}, {"author": "Assistant", "content": "a"}]}, [system(), *TALK], ()),
    ("author, then roles", {"messages": [{"author": "human", "content": "q"}, {"role": "assistant", "author": "human", "content": "a"}]}, TALK, ("messages.author",)),
    ("speaker", {"dialogue": [{"speaker": "USER", "text": "q"}, {"speaker": "bot", "text": "a"}]}, TALK, ()),
    (OPENROUTER, {"messages": [user(), answer(reasoning_details=[{"type": "reasoning.text", "text": "t", "signature": "x", "index": 0}])]}, [user(), THOUGHT], ()),
    (OPENROUTER, {"messages": [user(), answer(reasoning="t", reasoning_details=[{"type": "reasoning.text", "text": "t", "format": "anthropic-claude-v1"}])]}, [user(), THOUGHT], ()),
    (OPENROUTER, {"messages": [user(), answer(reasoning="t", reasoning_details=[{"type": "reasoning.text", "text": "t"}, {"type": "reasoning.encrypted", "data": "x"}])]},
     [user(), THOUGHT], ("messages.reasoning_details",)),
    (OPENROUTER, {"messages": [user(), answer(reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}])]}, TALK, ("messages.reasoning_details",)),
    (OPENROUTER, {"messages": [user(), answer(reasoning_details=[{"type": "reasoning.summary", "summary": "t"}, {"type": "reasoning.encrypted", "data": "x"}])]}, TALK,
     ("messages.reasoning_details",)),
    # turns
    (FACTORY, {"conversations": [turn("human", "q"), turn("function_call", json.dumps(CALL)), turn("observation", "r"), turn("gpt", "a")], "tools": json.dumps([TOOL])},
     [user(), calls(), result(), answer()], ()),
    (HF + "Open-Orca/SlimOrca", {"conversations": [turn("system", "s", weight=None), turn("human", "q", weight=0), turn("gpt", "a", weight=1)]}, [system(), *TALK], ()),
    (HF + "teknium/OpenHermes-2.5", {"conversations": TURNS, "system_prompt": None, "source": "x", "topic": None}, TALK, ()),
    (HF + "teknium/OpenHermes-2.5", {"conversations": TURNS, "system_prompt": "s", "source": "x"}, [system(), *TALK], ()),
    (HF + "Magpie-Align/Magpie-Pro-300K-Filtered", {"uuid": "1", "instruction": "q", "response": "a", "conversations": TURNS}, TALK, ("instruction", "response")),
    (HF + "NousResearch/hermes-function-calling-v1", {"conversations": [turn("system", "s"), *TURNS, turn("tool", "r"), turn("gpt", "a")], "tools": json.dumps([WRAPPED])},
     [system(), *TALK, result(), answer()], ()),
    (HF + "Salesforce/APIGen-MT-5k", {"conversations": [turn("human", "q"), turn("function_call", json.dumps(CALL)), turn("observation", "r"), turn("gpt", "a")],
                                      "tools": json.dumps([TOOL]), "system": "s"}, [system(), user(), calls(), result(), answer()], ()),
    (HF + "Team-ACE/ToolACE", {"system": "s", "conversations": [turn("user", "q"), turn("assistant", "a"), turn("tool", "r"), turn("assistant", "a")]},
     [system(), *TALK, result(), answer()], ()),
    (HF + "THUDM/AgentInstruct", {"conversations": [turn("human", "q", loss=None), turn("gpt", "a", loss=False), turn("human", "q", loss=None), turn("gpt", "a", loss=True)]},
     [user(), UNTRAINED, *TALK], ()),
    (HF + "anon8231489123/ShareGPT_Vicuna_unfiltered", {"id": "1", "conversations": [turn("human", "q"), turn("bing", "a")]}, TALK, ()),
    (HF + "RyokoAI/ShareGPT52K", {"conversations": [turn("user", "q"), turn("bard", "a"), turn("human", "q"), turn("chatgpt", "a")]}, TALK * 2, ()),
    ("https://docs.nvidia.com/nemo-framework/user-guide/latest/modelalignment/sft.html",
     {"system": "s", "conversations": [turn("User", "q"), turn("Assistant", "a")], "mask": "User", "type": "VALUE_TO_TEXT"}, [system(), *TALK], ()),
    ("https://lightning.ai/docs/litgpt", {"conversations": [turn("human", "q"), turn("ai", "a"), turn("human", "q"), turn("bot", "a")]}, TALK * 2, ()),
    (HF + "LDJnr/Capybara", {"source": "x", "conversation": [{"input": "q", "output": "a"}, {"input": "q", "output": "a"}]}, TALK * 2, ()),
    ("https://xtuner.readthedocs.io/en/latest/training/multi_turn_conversation.html",
     {"conversation": [{"system": "s", "input": "q", "output": "a"}, {"input": "q", "output": "a"}]}, [system(), *TALK, *TALK], ()),
    (HF + "GAIR/lima", {"conversations": ["q", "a", "q", "a"], "source": "x"}, TALK * 2, ()),
    (HF + "stingning/ultrachat", {"id": "1", "data": ["q", "a"]}, TALK, ()),
    (HF + "AgentGym/AgentTraj-L", {"conversations": [turn("human", "q", loss=None), turn("gpt", "a", loss=True)], "item_id": "x"}, TALK, ()),
    # pairs
    (HF + "tatsu-lab/alpaca", {"instruction": "q", "input": "x", "output": "a", "text": "…"}, [user("q\nx"), answer()], ()),
    (HF + "yahma/alpaca-cleaned", {"instruction": "q", "input": "", "output": "a"}, TALK, ()),
    (FACTORY, {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["q1", "a1"], ["q2", "a2"]]},
     [system(), user("q1"), answer("a1"), user("q2"), answer("a2"), user("q\nx"), answer()], ()),
    (FACTORY, {"instruction": "q", "output": "a", "thinking": "t"}, [user(), THOUGHT], ()),
    (HF + "databricks/databricks-dolly-15k", {"instruction": "q", "context": "x", "response": "a", "category": "qa"}, [user("q\nx"), answer()], ()),
    (HF + "databricks/databricks-dolly-15k", {"instruction": "q", "context": "", "response": "a", "category": "qa"}, TALK, ()),
    (HF + "Benjoyo/distilabel-example", {"instruction": "q", "generation": "a", "distilabel_metadata": {}, "model_name": "m"}, TALK, ()),
    (HF + "nvidia/OpenCodeReasoning-2", {"question": "q", "r1_generation": "b", "qwq_critique": "c", "solution": "a", "judgement": "right", "source": "x", "split": "x", "id": "1"},
     TALK, ("qwq_critique", "r1_generation")),
    (HF + "Congliu/Chinese-DeepSeek-R1-Distill-data-110k", {"input": "q", "reasoning_content": "t", "content": "a", "repo_name": "x", "score": 9}, [user(), THOUGHT], ()),
    (HF + "iamtarun/python_code_instructions_18k_alpaca", {"instruction": "write a loop that counts", "input": "", "output": "for n in range(9): …",
                                                           "prompt": "### Instruction:\nwrite a loop that counts\n\n### Output:\nfor n in range(9): …"},
     [user("write a loop that counts"), answer("for n in range(9): …")], ("prompt",)),
    (HF + "camel-ai/math", {"role_1": "x", "topic;": "x", "sub_topic": "x", "message_1": "q", "message_2": "a"}, TALK, ()),
    (HF + "math-ai/StackMathQA", {"Q": "q", "A": "a", "meta": {}}, TALK, ()),
    (HF + "YeungNLP/firefly-train-1.1M", {"kind": "x", "input": "q", "target": "a"}, TALK, ()),
    (HF + "HuggingFaceH4/helpful-instructions", {"instruction": "q", "demonstration": "a", "meta": {}}, TALK, ()),
    (HF + "qwedsacf/grade-school-math-instructions", {"INSTRUCTION": "q", "RESPONSE": "a", "SOURCE": "x"}, TALK, ()),
    (HF + "silk-road/alpaca-data-gpt4-chinese", {"instruction": "q", "input": "", "output": "a", "instruction_zh": "x", "input_zh": "", "output_zh": "y"}, TALK,
     ("instruction_zh", "output_zh")),
    ("https://ai.google.dev/gemini-api/docs/model-tuning", {"text_input": "q", "output": "a"}, TALK, ()),
    (HF + "TIGER-Lab/MathInstruct", {"source": "x", "output": "a", "instruction": "q"}, TALK, ()),
    (HF + "ise-uiuc/Magicoder-OSS-Instruct-75K", {"lang": "python", "problem": "q", "solution": "a", "seed": "x"}, TALK, ()),
    (HF + "ise-uiuc/Magicoder-Evol-Instruct-110K", {"instruction": "q", "response": "a"}, TALK, ()),
    (HF + "m-a-p/CodeFeedback-Filtered-Instruction", {"query": "q", "answer": "a", "resource": "x", "lang": "python"}, TALK, ()),
    (HF + "meta-math/MetaMathQA", {"type": "x", "query": "q", "original_question": "o", "response": "a"}, TALK, ("original_question",)),
    (HF + "microsoft/orca-math-word-problems-200k", {"question": "q", "answer": "a"}, TALK, ()),
    (HF + "Open-Orca/OpenOrca", {"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, [system(), *TALK], ()),
    (HF + "nvidia/HelpSteer2", {"prompt": "q", "response": "a", "helpfulness": 4}, TALK, ()),
    (HF + "nvidia/OpenMathInstruct-2", {"problem": "q", "generated_solution": "a", "expected_answer": "4", "problem_source": "x"}, TALK, ("expected_answer",)),
    (HF + "nvidia/OpenMathReasoning", {"expected_answer": "4", "problem_type": "x", "problem_source": "x", "generation_model": "m", "pass_rate_72b_tir": "0.5", "problem": "q",
                                       "generated_solution": "a", "inference_mode": "cot", "used_in_kaggle": True}, TALK, ("expected_answer",)),
    (HF + "nvidia/OpenMathInstruct-1", {"question": "q", "expected_answer": "4", "generated_solution": "a", "is_correct": True}, TALK, ("expected_answer",)),
    (HF + "nvidia/OpenCodeReasoning", {"id": "1", "input": "q", "output": "a", "solution": "code", "split": "train"}, TALK, ("solution",)),
    (HF + "nvidia/OpenCodeInstruct", {"id": "1", "input": "q", "output": "a", "unit_tests": "[]"}, TALK, ()),
    (HF + "nvidia/OpenScienceReasoning-2", {"expected_answer": "4", "input": "q", "output": "a"}, TALK, ("expected_answer",)),
    (HF + "nvidia/AceReason-1.1-SFT", {"category": "math", "source": "x", "input": "q", "output": "a"}, TALK, ()),
    (HF + "nvidia/Llama-Nemotron-Post-Training-Dataset", {"input": [user()], "output": "a", "reasoning": "on", "system_prompt": "s", "used_in_training": "x"},
     [system(), *TALK], ()),
    (HF + "nvidia/Llama-Nemotron-Post-Training-Dataset", {"input": [user(), answer(), user()], "output": "a", "reasoning": "off", "system_prompt": ""}, TALK * 2, ()),
    (HF + "FreedomIntelligence/medical-o1-reasoning-SFT", {"Question": "q", "Complex_CoT": "t", "Response": "a"}, [user(), THOUGHT], ()),
    (HF + "simplescaling/s1K-1.1", {"solution": "a", "question": "q", "cot_type": "math", "source_type": "x", "metadata": "{}", "gemini_thinking_trajectory": "t",
                                    "gemini_attempt": "b", "deepseek_thinking_trajectory": "t", "deepseek_attempt": "b"},
     TALK, ("deepseek_attempt", "deepseek_thinking_trajectory", "gemini_attempt", "gemini_thinking_trajectory")),
    (HF + "open-thoughts/OpenThoughts-114k#metadata", {"problem": "q", "deepseek_reasoning": "t", "deepseek_solution": "a", "ground_truth_solution": "4"},
     [user(), THOUGHT], ("ground_truth_solution",)),
    (HF + "GAIR/LIMO", {"question": "q", "solution": "a", "answer": "4"}, TALK, ("answer",)),
    (HF + "simplescaling/s1K", {"solution": "a", "question": "q", "cot_type": "math", "source_type": "x", "metadata": "{}", "cot": None, "thinking_trajectories": ["t"],
                                "attempt": "b"}, TALK, ("attempt", "thinking_trajectories")),
    (HF + "HuggingFaceH4/MATH-500", {"problem": "q", "solution": "a", "answer": "4", "level": 2}, TALK, ("answer",)),
    (HF + "CohereLabs/aya_dataset", {"inputs": "q", "targets": "a", "language": "English"}, TALK, ()),
    (HF + "kaist-ai/CoT-Collection", {"source": "q", "target": "a", "rationale": "t", "task": "x"}, [user(), THOUGHT], ()),
    (HF + "b-mc2/sql-create-context", {"question": "q", "context": "x", "answer": "a"}, [user("q\nx"), answer()], ()),
    (HF + "Salesforce/xlam-function-calling-60k", {"id": 1, "query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])}, [user(), calls()], ()),
    (TRL, {"prompt": "q", "completion": "a"}, TALK, ()),
    (TRL, {"prompt": [system(), user()], "completion": [answer()]}, [system(), *TALK], ()),
    (TRL, {"prompt": [user(), answer(), user()], "completion": [answer()]}, [user(), UNTRAINED, *TALK], ()),
    (TRL, {"prompt": "q", "completion": "a", "label": True}, TALK, ("label",)),
    (TRL, {"prompt": [user()], "completion": [answer(None, tool_calls=[{"type": "function", "function": CALL}])], "tools": [WRAPPED]}, [user(), calls()], ()),
    ("https://github.com/PrimeIntellect-ai/prime-rl/blob/main/docs", {"prompt": [user()], "completion": [answer()], "task": "x"}, TALK, ()),
    (SWIFT, {"query": "q", "response": "a"}, TALK, ()),
    (SWIFT, {"system": "s", "query": "q", "response": "a", "history": [["q", "a"]]}, [system(), *TALK, *TALK], ()),
    ("https://cloud.google.com/vertex-ai/generative-ai/docs/models/tune-function-calling", {"user": "q", "assistant": "a"}, TALK, ()),
    # openai-harmony's own JSON
    (HARMONY, {"messages": [said("system", [{"type": "system_content", "reasoning_effort": "High"}]), said("user", part("q")),
                            said("assistant", part("t"), channel="analysis"), said("assistant", part("a"), channel="final")]},
     [user(), THOUGHT], ("system_content",)),
    (HARMONY, {"messages": [said("developer", [{"type": "developer_content", "instructions": "s", "tools": {"functions": {"name": "functions", "tools": [TOOL]}}}]),
                            said("user", part("q")), said("assistant", part("t"), channel="analysis"),
                            said("assistant", part('{"x": 1}'), channel="commentary", recipient="functions.f", content_type="json"),
                            said("tool", part("r"), name="functions.f", recipient="assistant", channel="commentary"), said("assistant", part("a"), channel="final")]},
     [said("developer", "s"), user(), {**calls(), "reasoning_content": "t"}, result(name="f"), answer()], ()),
    # agents' traces
    ("https://github.com/laude-institute/harbor/blob/main/docs/rfcs/0001-trajectory-format.md",
     {"schema_version": "ATIF-v1.4", "session_id": "1", "agent": {"name": "n", "version": "1", "tool_definitions": [WRAPPED]}, "steps": [
         {"step_id": 1, "source": "user", "message": "q"},
         {"step_id": 2, "source": "agent", "message": "", "reasoning_content": "t", "tool_calls": [{"tool_call_id": "1", "function_name": "f", "arguments": {"x": 1}}],
          "observation": {"results": [{"source_call_id": "1", "content": "r"}]}, "metrics": {}},
         {"step_id": 3, "source": "agent", "message": "a"}]},
     [user(), {**calls("", id="1"), "reasoning_content": "t"}, result(tool_call_id="1"), answer()], ()),
    ("https://github.com/laude-institute/harbor/blob/main/docs/rfcs/0001-trajectory-format.md",
     {"schema_version": "ATIF-v1.4", "agent": {"name": "n"}, "steps": [
         {"step_id": 1, "source": "user", "message": "q"},
         {"step_id": 2, "source": "agent", "message": "", "tool_calls": [{"tool_call_id": "1", "function_name": "f", "arguments": {"x": 1}}]},
         {"step_id": 3, "source": "agent", "message": "a"}]},
     [user(), calls("", id="1"), answer()], ("calls without a result",)),
    ("https://github.com/neulab/agent-data-protocol",
     {"id": "1", "content": [{"class_": "text_observation", "content": "q", "source": "user"}, {"class_": "api_action", "function": "f", "kwargs": {"x": 1}, "description": "d"},
                             {"class_": "text_observation", "content": "r", "source": "environment"}, {"class_": "message_action", "content": "a", "description": None}], "details": {"run": "1"}},
     [user(), calls("d"), result(), answer()], ()),
    ("https://github.com/All-Hands-AI/OpenHands/tree/main/evaluation",
     {"instance_id": "1", "history": [{"id": 0, "source": "user", "action": "message", "args": {"content": "q"}},
                                      {"id": 1, "source": "environment", "observation": "agent_state_changed", "content": ""},
                                      {"id": 2, "source": "agent", "action": "f", "args": {"x": 1, "thought": "d", "blocking": False}},
                                      {"id": 3, "source": "environment", "observation": "f", "content": "r", "cause": 2},
                                      {"id": 4, "source": "agent", "action": "finish", "args": {"final_thought": "a"}}], "metrics": {}},
     [user(), calls("d"), result(), answer()], ("events: agent_state_changed",)),
    ("https://swe-agent.com/latest/usage/trajectories/",
     {"environment": "e", "trajectory": [], "info": {}, "history": [
         {"role": "system", "content": "s", "agent": "main", "message_type": "system_prompt"},
         {"role": "user", "content": part("q"), "agent": "main", "message_type": "observation"},
         {"role": "assistant", "content": "d", "thought": "d", "action": "f", "agent": "main", "message_type": "action",
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
         {"role": "tool", "content": part("r"), "agent": "main", "message_type": "observation", "tool_call_ids": ["1"]},
         {"role": "assistant", "content": "a", "thought": "a", "action": "", "agent": "main", "message_type": "action"}]},
     [system(), user(), calls("d", id="1"), result(tool_call_id="1"), answer()], ()),
    (HF + "nebius/SWE-agent-trajectories",
     {"instance_id": "1", "target": True, "trajectory": [{"cutoff_date": "01.01.2023", "mask": False, "role": "system", "system_prompt": "s", "text": None},
                                                         {"cutoff_date": None, "mask": False, "role": "user", "system_prompt": None, "text": "q"},
                                                         {"cutoff_date": None, "mask": False, "role": "ai", "system_prompt": None, "text": "a"}]},
     [system(), *TALK], ()),
    (HF + "nebius/SWE-rebench-openhands-trajectories",
     {"trajectory": [system(), user(), answer(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]),
                     result(name="f", tool_call_id="1"), answer()], "tools": [WRAPPED], "resolved": 1},
     [system(), user(), calls(id="1"), result(name="f", tool_call_id="1"), answer()], ()),
]  # fmt: skip
"""The source of a shape, a row of it, its messages, and the fields that are counted as not read."""


REFUSED = [
    (HF + "OpenAssistant/oasst2", {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter", "lang": "en"}, "no_messages", "'text', 'role'"),
    (HF + "lmsys/chatbot_arena_conversations", {"question_id": "1", "conversation_a": TALK, "conversation_b": TALK, "winner": "model_a"}, "no_messages", "'conversation_a'"),
    (HF + "glaiveai/glaive-function-calling-v2", {"system": "SYSTEM: s", "chat": "USER: q ASSISTANT: a"}, "no_messages", "'chat'"),
    (HF + "Anthropic/hh-rlhf", {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q"}, "no_messages", "tokenmill rl"),
    (HF + "cognitivecomputations/dolphin-r1", {"messages": [system(), user()], "reasoning": "t", "answer": "a", "model": "m"}, "no_assistant", '"response": "answer"'),
    (HF + "gabrielmbmb/offline-batch-generation", {"instruction": "q", "completion": "a", "generation": "b", "model_name": "m"}, "no_messages", "generation beside"),
    (HF + "Muennighoff/natural-instructions", {"task_name": "x", "id": "1", "definition": "d", "inputs": "q", "targets": "a"}, "no_messages", "definition beside"),
    (OPENROUTER, {"messages": [user(), answer(reasoning=[{"type": "reasoning.text", "text": "t"}])]}, "bad_reasoning",
     "its reasoning is an array"),
    (ANTHROPIC, {"messages": [user(), answer([{"type": "tool_use", "id": "1", "name": "f", "input": {}}, *part("a")])]}, "not_text", "after a tool_use"),
    (ANTHROPIC, {"messages": [user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]), answer()]}, "not_text", "the type 'image'"),
    ("speaker", {"dialogue": [{"speaker": "Alice", "text": "q"}, {"speaker": "Bob", "text": "a"}]}, "unknown_role", "'speaker'"),
    (HF + "rajpurkar/squad", {"id": "1", "title": "x", "context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}, "no_messages", "'answers'"),
    (HF + "HuggingFaceM4/the_cauldron", {"images": ["i"], "texts": [{"user": "q", "assistant": "a"}]}, "no_messages", "'texts'"),
]  # fmt: skip
"""Rows that aren't conversations, or can be read in two ways: source, row, reason, and a word of the message."""


@pytest.mark.parametrize(("source", "row", "reason", "word"), REFUSED, ids=[row[0] for row in REFUSED])
def test_rows_rejected_by_name(source, row, reason, word):
    found = conversation(row, None, "tools")
    assert isinstance(found, Rejected), (source, found)
    assert (found.reason, word in found.detail) == (reason, True), found.detail


def plain(messages):
    """The messages with the arguments of calls as dicts."""
    return json.loads(json.dumps([{**message, "trained": list(message.get("trained", "-"))} for message in messages]))


@pytest.mark.parametrize(
    ("source", "row", "messages", "unread"), READ, ids=[f"{n}-{row[0]}" for n, row in enumerate(READ)]
)
def test_shapes_become_messages_and_unread_fields_are_counted(source, row, messages, unread):
    found = conversation(row, None, "tools")
    assert isinstance(found, Conversation), (source, found)
    assert plain(found.messages) == plain(messages)
    assert found.unread == tuple(unread)
    assert shape_name(row)
    functions = [tool.get("function", tool) for tool in found.tools]
    assert functions == ([TOOL] if re.search('"(parameters|input_schema)"', json.dumps(row).replace("\\", "")) else [])


def without_empty(value):
    """A value without empty objects, which Parquet doesn't have."""
    if isinstance(value, dict):
        return {key: without_empty(inner) for key, inner in value.items() if inner != {}}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def test_parquet_rows_are_read_like_json(tmp_path):
    fields, mixed = fields_read(None, "tools"), 0
    for number, (source, row, _, _) in enumerate(READ):
        path, kept = tmp_path / f"{number}.parquet", without_empty(row)
        try:
            table = pa.table({name: pa.array([value]) for name, value in kept.items()})
        except pa.ArrowInvalid:  # texts and lists in one column
            mixed += 1
            continue
        pq.write_table(table, path)
        [batch] = read_records(Slice(SourceFile(str(path), path.stat().st_size, "parquet"), 0, 1), fields)
        assert conversation(batch.records[0], None, "tools") == conversation(kept, None, "tools"), source
    assert mixed < 10


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"system": "rules", "tools": "meta.tools"}, ()),
        ({"system": "rulse"}, ("fields.system 'rulse' in no row",)),
        ({"history": "meta.past"}, ("fields.history 'meta.past' in no row",)),
    ],
)
def test_fields_of_the_blend_that_a_row_lacks_are_counted(fields, unread):
    row = {"q": "hi", "a": "yo", "rules": "Be kind.", "meta": {"tools": [TOOL]}}
    found = conversation(row, None, "tools", given_of({"prompt": "q", "response": "a", **fields}))
    assert found.unread == unread


IDS = [1, 2, 99]
BAD_TOKENS = {
    "a negative id": ({"input_ids": [1, -2, 3], "loss_mask": [0, 1, 1]}, "input_ids[1] is -2;"),
    "an id beyond the vocabulary": ({"input_ids": [*IDS, 100], "loss_mask": [0, 1, 1, 1]}, "input_ids[3] is 100;"),
    "an id beyond 64 bits": ({"input_ids": [1, 10**30], "loss_mask": [0, 1]}, "input_ids[1] is 10000000000000000000;"),
    "a float": ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "input_ids[1] is 2.0;"),
    "a boolean": ({"input_ids": [1, True], "loss_mask": [0, 1]}, "input_ids[1] is True;"),
    "a string": ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "input_ids[1] is '2';"),
    "null": ({"input_ids": IDS, "loss_mask": [0, 1, None]}, "loss_mask[2] is null;"),
    "lists": ({"input_ids": [IDS], "labels": [IDS]}, "input_ids[0] is an array;"),
    "no list": ({"input_ids": "1 2", "labels": [1, 2]}, "input_ids is a string;"),
    "neither 0 nor 1": ({"input_ids": IDS, "assistant_masks": [0, 1, 2]}, "assistant_masks[2] is 2;"),
    "between 0 and 1": ({"input_ids": IDS, "loss_mask": [0, 0.5, 1]}, "loss_mask[1] is 0.5;"),
    "too few labels": ({"input_ids": IDS, "labels": IDS[:2]}, "labels has 2 entries, but input_ids has 3;"),
    "too long a mask": ({"prompt_ids": [1], "prompt_mask": [0, 0], "completion_ids": IDS, "completion_mask": [1] * 3}, "prompt_mask has 2 entries, but prompt_ids has 1;"),
    "shifted labels": ({"input_ids": IDS, "labels": [2, 99, -100]}, "labels[0] is 2, but input_ids[0] is 1;"),
    "another label for nothing": ({"input_ids": IDS, "labels": [1, -1, 99]}, "labels[1] is -1, but input_ids[1] is 2;"),
    "padding": ({"input_ids": [*IDS, 0], "labels": [*IDS, -100], "attention_mask": [1, 1, 1, 0]}, "attention_mask[3] is 0;"),
    "a pack": ({"input_ids": IDS, "loss_mask": [0, 1, 0], "seq_start_id": [0]}, "it has seq_start_id,"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "detail"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_ids_and_masks_that_do_not_fit_are_rejected_by_position_and_value(row, detail):
    found = tokenized(row, 100, "tools", ())
    assert isinstance(found, Rejected)
    assert (found.reason, found.detail[: len(detail)]) == ("bad_tokens", detail)


@pytest.mark.parametrize(
    "row",
    [{"loss_mask": [1, 0, 0]}, {"labels": [-100] * 3}, {"completion_mask": [0, 1, 0], "assistant_masks": [0, 0, 1]}],
)
def test_a_tokenized_row_without_a_token_to_train_on(row):
    assert tokenized({"input_ids": IDS, **row}, 100, "tools", ()).reason == "nothing_trained"


def test_a_tokenized_row_is_known_by_its_ids_and_a_mask():
    row = {"input_ids": IDS, "labels": IDS, "text": "t", "prompt": "q", "tools": [TOOL], "system": ""}
    assert shape_name(row) == "pre-tokenized rows"
    assert tokenized(row, 100, "tools", ()).unread == ("prompt", "tools")
    assert tokenized({**row, "images": ["i"]}, 100, "tools", ()).reason == "not_text"
    assert conversation({"input_ids": IDS}, None, "tools").reason == "no_messages"


NAMED = {
    "a pair": ({"ask": "q", "say": "a"}, {"prompt": "ask", "response": "say"}, TALK, ()),
    "nested, and in JSON text": ({"row": json.dumps({"ask": "q"}), "out": {"say": "a"}}, {"prompt": "row.ask", "response": "out.say"}, TALK, ()),
    "all parts": (
        {"ask": "q", "say": "a", "rules": "s", "turns": [["q", "a"]], "can": json.dumps([TOOL])},
        {"prompt": "ask", "response": "say", "system": "rules", "history": "turns", "tools": "can"},
        [system(), *TALK, *TALK],
        (),
    ),
    "messages for a question": ({"ask": [system(), user()], "say": "a"}, {"prompt": "ask", "response": "say"}, [system(), *TALK], ()),
    "among others": ({"prompt": "q", "query": "p", "response": "a", "context": "c"}, {"prompt": "prompt", "response": "response"}, TALK, ("context", "query")),
    "a system prompt alone": ({"messages": TALK, "rules": "s"}, {"system": "rules"}, [system(), *TALK], ()),
    "one of two system prompts": ({"prompt": "q", "response": "a", "system": "s", "system_prompt": "t"}, {"system": "system"}, [system(), *TALK], ("system_prompt",)),
    "tools alone": ({"messages": TALK, "metadata": json.dumps({"tools": [TOOL]})}, {"tools": "metadata.tools"}, TALK, ()),
}  # fmt: skip


@pytest.mark.parametrize(("row", "fields", "messages", "unread"), NAMED.values(), ids=NAMED)
def test_fields_that_the_blend_names_are_read(row, fields, messages, unread):
    found = conversation(row, None, "tools", given_of(fields))
    assert isinstance(found, Conversation), found
    assert (plain(found.messages), found.unread) == (plain(messages), unread)
    assert found.tools == ([TOOL] if "tools" in fields else [])


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (
            {"messages": [user([{"type": "input_text", "text": "q"}]), answer([{"type": "output_text", "text": "a"}])]},
            (),
        ),
        ({"messages": TALK, "weights": [0, 1]}, ("weights",)),
        ({"messages": [{"role": "user", "value": "q"}, {"role": "Assistant", "text": "a"}]}, ()),
        ({"messages": [user(), answer(think_text="t", tool_count=3)]}, ("messages.think_text",)),
        ({"userPrompt": "x", "prompt": "q", "completion": "a", "prompt_tokens": 3, "answered": True}, ("userPrompt",)),
    ],
)
def test_names_that_speak_of_conversations_are_read_or_counted(row, unread):
    found = conversation(row, None, "tools")
    assert (plain(found.messages), found.unread) == (plain(TALK), unread)


def test_a_field_that_the_row_lacks_is_named():
    found = conversation({"ask": "q", "said": "a"}, None, "tools", given_of({"prompt": "ask", "response": "say"}))
    assert isinstance(found, Rejected)
    assert found.detail == "there is no say; the fields with a value: 'ask', 'said'"


def test_an_unknown_shape_names_its_fields_and_the_keys_of_the_blend():
    found = conversation({"ask": "q", "say": "a"}, None, "tools")
    assert isinstance(found, Rejected)
    assert found.reason == "no_messages"
    for word in ("'ask', 'say'", '"messages_field"', '"fields": {"prompt"'):
        assert word in found.detail


@given(st.sampled_from(READ), st.data())
def test_meaningful_extra_fields_are_read_rejected_or_counted(example, data):
    """A field of the table beside any row: with the field, messages differ, or the row is refused by its name, or it is counted."""
    _, row, _, _ = example
    name = data.draw(st.sampled_from(sorted(set(KNOWN) - METADATA - {key.lower() for key in row})))
    assume(name != "trajectory" or "history" not in row)  # SWE-agent writes the same steps to both
    before = conversation(row, None, "tools")
    found = conversation({**row, name: "something"}, None, "tools")
    if isinstance(found, Rejected):
        # With an instruction, `input` is Alpaca's, whose array is then named.
        assert name in found.detail or found.reason in {"bad_tools", "two_systems", "not_text"}
    else:
        assert (
            name in found.unread
            or found.messages != before.messages
            or any("something" in str(m) for m in found.messages)
        )
