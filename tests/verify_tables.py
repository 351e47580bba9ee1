"""The tables of docs/results.md: which promise each line states, which rows stand after it, and what it shows of them.

`shows` is a format string over the values of those rows. `{same:sum}` adds a value up over the rows, `{tau:.2f}` shows
its smallest and largest value, `{ms:max.0f}` only the largest. `{good}` and `{rows}` count the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

TEXTS = "{same:sum}/{of:sum} texts, {tokens:sum} tokens, tau {tau:.2f}"
STEP = "{ms:.2f} ms; floor {floor_ms:.2f} ms, {ratio:.2f} times that"
CHECKS = "{good} of {rows} checks pass"
WIDE = "{times:.3f} times the verify of 16 rows"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a promise and the rows of one section that bear on it."""

    promise: str
    section: str
    shows: str
    rows: str = ""  # a regular expression for the promises of the rows; empty: all rows of the section


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    lines: tuple[Line, ...]


EXACTNESS = (
    Line("Greedy text is plain text", "greedy_alone", TEXTS),
    Line("Sampled text (penalties, top-k, logprobs...) is plain text", "sampled_alone", TEXTS),
    Line("Eight different requests in a batch write what each writes alone", "mixed_batches", TEXTS),
    Line("DSpark drafter, greedy, ten modes: text as plain, wider trees accept more", "dspark_greedy", TEXTS),
    Line("DSpark drafter, T 0.8: the same, and noise shared with the target accepts more", "dspark_sampled", TEXTS),
    Line("DFlash drafter, greedy, ten modes: text as plain, wider trees accept more", "dflash_greedy", TEXTS),
    Line("DFlash drafter, T 0.8: the same, and noise shared with the target accepts more", "dflash_sampled", TEXTS),
    Line("Prompts at page borders, and the empty prompt", "edges", TEXTS),
    Line("Prefill in chunks changes no text", "chunked_prefill", TEXTS),
    Line(
        "A prefix hit changes neither text nor acceptance",
        "prefix_hits",
        "{same:sum}/{of:sum} texts, {cached_share:.0%} of the prompts cached, tau {tau_ratio:.4f} of cold",
    ),
    Line("A long conversation with and without the cache", "conversation", "{cached_tokens:,} tokens cached"),
    Line("Tau behind long documents is at least 0.9 of its value at 512", "contexts", "worst {worst:.2f} of it"),
    Line("transformers and the authors' loop write the same", "oracles", "{same:sum}/{of:sum} texts"),
    Line("Random operations leak no page", "operations", "{lost_pages:sum} pages lost"),
    Line(
        "Logits of all families are those of transformers",
        "families",
        "largest difference {difference:max.1e}",
        "logits as transformers",
    ),
    Line("Speculative text of all families is plain text", "families", "{same:sum}/{of:sum} texts", "text as plain"),
    Line("llama.cpp writes the same from our files", "families", "{same:sum}/{of:sum} texts", "llama.cpp's greedy"),
    Line("Random requests in random company", "differential_texts", "{different:sum} of {texts:sum} texts differ"),
)
CPU_SPEED = (
    Line(
        "`auto` is at least 0.95 of the best fixed mode",
        "auto_speed",
        "{ratio:.3f} of it; {auto_over_plain:.2f} times plain",
        "T 0",
    ),
    Line("`auto` is at least 0.98 of it in the mean", "auto_speed", "{ratio:.3f} of it", "all sets"),
    Line("`auto` is at least 0.93 of it on a disturbed machine", "disturbed_auto", "{ratio:.3f} of it"),
    Line("Drafts from the text beside a drafter", "text_drafts", "{ratio:.2f} times without", "over auto without"),
    Line("Drafts from the text alone", "text_drafts", "{ratio:.2f} times plain", "over plain"),
    Line(
        "Plain decoding over llama.cpp, greedy",
        "cpu_speed",
        "{ratio:.2f} times; {tok_s_plain:.0f} against {tok_s_rival:.0f} tok/s",
        "plain over llama",
    ),
    Line(
        "`auto` over plain on code and mathematics, greedy (at least 1.5)",
        "cpu_speed",
        "{ratio:.2f} times; {tok_s_auto:.0f} tok/s",
        "^(humaneval|gsm8k), greedy: auto over plain",
    ),
    Line("`auto` over llama.cpp on these (at least 2)", "cpu_speed", "{ratio:.2f} times", "auto over llama"),
    Line(
        "`auto` over plain on chat, greedy (at least 0.97)",
        "cpu_speed",
        "{ratio:.3f} times; {tok_s_auto:.0f} tok/s",
        "^mt-bench, greedy: auto over plain",
    ),
    Line("`auto` over plain, T 0.8 (at least 0.97)", "cpu_speed", "{ratio:.3f} times", "T 0.8: auto over plain"),
    Line(
        "Prefill over llama.cpp (at least 0.8)",
        "cpu_speed",
        "{ratio:.2f} times; {tok_s_ours:,.0f} against {tok_s_rival:.0f} tok/s",
        "prefill",
    ),
    Line(
        "16 rows over one row (at most 3 without AMX, 2 with it)",
        "cpu_speed",
        "{ratio:.2f} times; one row {ms_1:.2f} ms, byte floor {byte_floor_ms:.2f} ms",
        "16 rows",
    ),
    Line(
        "No other process ran during the race",
        "cpu_speed",
        "others used {others_share:.2%} of a core",
        "waits for its turn",
    ),
    Line("A useless drafter is given up within 64 tokens", "adversarial", "{share:.1%} of later steps", "given up"),
    Line(
        "`auto` over plain where drafts are useless (at least 0.98)",
        "adversarial",
        "{ratio:.3f} times plain's speed",
        "against plain",
    ),
)
GPU_SPEED = (
    Line("Kernels are right, and a row's bits are its own", "gpu_checks", CHECKS),
    Line("8B shape, bf16, plain step (at most 5.2 ms)", "gpu_steps", STEP, "context, plain"),
    Line("8B shape, bf16, draft and verify of 16 rows (at most 6.5 ms)", "gpu_steps", STEP, "context, draft"),
    Line("8B shape, bf16, verify of 64 rows (at most 1.1)", "gpu_steps", WIDE, "64 rows"),
    Line("The authors' step (at least 7 times ours)", "gpu_steps", "{ms:.1f} ms, {times:.1f} times ours", "^authors'"),
    Line("A plain step of transformers", "gpu_steps", "{ms:.1f} ms, {times:.1f} times ours", "^transformers"),
    Line("8B shape, Q8_0, plain step (at most 3.6 ms)", "gpu_q8_0", STEP, "context, plain"),
    Line("8B shape, Q8_0, draft and verify of 16 rows", "gpu_q8_0", STEP, "context, draft"),
    Line("8B shape, Q8_0, verify of 64 rows", "gpu_q8_0", WIDE, "64 rows"),
    Line("8B shape, Q4_K, plain step (at most 3.2 ms)", "gpu_q4_k", STEP, "context, plain"),
    Line("8B shape, Q4_K, draft and verify of 16 rows", "gpu_q4_k", STEP, "context, draft"),
    Line("8B shape, Q4_K, verify of 64 rows", "gpu_q4_k", WIDE, "64 rows"),
    Line("8B shape, contexts of 1K to 32K", "gpu_contexts", STEP),
    Line("8B shape, 1 to 64 sequences", "gpu_batches", STEP),
    Line("Qwen3.6-27B, bf16 (at most 1.5 for plain and 16 rows)", "gpu_families", STEP, "^Qwen3.6-27B, bf16"),
    Line("Qwen3.6-35B-A3B, bf16 (the same bound)", "gpu_families", STEP, "^Qwen3.6-35B-A3B, bf16"),
    Line("Laguna-XS.2, bf16 (the same bound)", "gpu_families", STEP, "^Laguna-XS.2, bf16"),
    Line("The three in Q4_K", "gpu_families", STEP, "Q4_K"),
    Line("SmolLM2, bf16, one sequence, plain", "gpu_pair", "{tok_s:,.0f} tok/s", "^(the text alone, )?bf16.*, plain:"),
    Line(
        "SmolLM2, bf16, one sequence, speculative: text as plain",
        "gpu_pair",
        "{same:sum}/{of:sum} texts, {tok_s:,.0f} tok/s, {over_plain:.2f} times plain",
        "^bf16.*, (chain|tree:16|tree:64|auto):",
    ),
    Line(
        "SmolLM2, `auto` at one sequence (at least 0.98 of the best fixed mode)",
        "gpu_pair",
        "{ratio:.3f} of it",
        "auto beside the best fixed mode",
    ),
    Line(
        "SmolLM2, drafts from the text alone: text as plain",
        "gpu_pair",
        "{same:sum}/{of:sum} texts, {over_plain:.2f} times plain",
        "^the text alone.*, (auto|tree:16:text):",
    ),
    Line("SmolLM2, transformers and the authors' loop", "gpu_pair", "{tok_s:.0f} tok/s", "^the same weights"),
    Line(
        "SmolLM2, `auto` over plain, 1 to 64 sequences (at least 0.98)", "gpu_pair", "{ratio:.2f} times", "^throughput"
    ),
    Line("The host waits at most once a step", "gpu_pair", "{waits:sum} waits in {steps:sum} steps", "^waits"),
)
SERVER = (
    Line(
        "Requests in a crowd write what each writes alone",
        "server_crowd",
        "{requests:} at once, {other_texts:} texts differ, {other_counts:} counts differ",
        "requests at once",
    ),
    Line("Eight requests together (at least 1)", "server_crowd", "{ratio:.2f} times as fast", "eight requests"),
    Line(
        "A server under load leaks nothing",
        "server_load",
        "{clients:} clients for {seconds:.0f} s, {complete:,} streams, {growth_mb:+.1f} MB, {pages_held:} pages held",
    ),
)
HOSTILE = (
    Line(
        "The worst bodies do not silence a stream or take memory",
        "hostile_bodies",
        "{within:sum} of {bodies:sum} within limits; silence {silence_ms:} ms, {growth:} times their size",
        "the worst bodies",
    ),
    Line("Bodies over the limits", "hostile_bodies", "{over_silence_ms:} ms of silence", "a hostile body"),
    Line(
        "Idle connections do not stop a server",
        "hostile_connections",
        "{connections:,} held; /health within {slowest_health_s:} s, {failed:} failed, silence {silence_ms:} ms",
    ),
    Line(
        "Streams beside a hostile client take at most twice as long",
        "hostile_company",
        "{slowdown:.2f} times as long, silence {silence_ms:} ms",
    ),
    Line("Random constraints end no process", "fuzzed_constraints", "{tried:sum} tried, {hung:sum} hung"),
    Line("The compiled kernels under sanitizers", "sanitizers", CHECKS),
    Line("Every case of the tests that `make test` samples", "sampled_tests", CHECKS),
)
FILES = (
    Line(
        "Tau by the drafter's weight type (at least 0.9, q4_0 apart)",
        "files_tau",
        "at least {least_ratio:.3f} of the shipped type's",
        "draft's type",
    ),
    Line("Tau by the target's weight type", "files_tau", "at least {least_ratio:.3f} of it, no bound", "target's type"),
    Line("Tau as in llama.cpp, F32 (within 3 %)", "llama_cpp_tau", "{tau:.3f} here, {rival_tau:.3f} there", "in F32"),
    Line(
        "Tau as in llama.cpp, shipped types (no real difference)",
        "llama_cpp_tau",
        "{tau:.3f} here, {rival_tau:.3f} there",
        "as shipped",
    ),
    Line(
        "Weight formats predict like fp32 (perplexity within 0.5 %)",
        "quality",
        "{difference:+.3%}; same greedy token at {agreement:.1%}",
    ),
    Line(
        "Damaged files give a clear error",
        "fuzz_files",
        "{files:sum} files, {failed:sum} failed, at most {largest_mb:max.1f} MB allocated",
    ),
)
TABLES = (
    Table("Exactness", EXACTNESS),
    Table("Speed on a CPU", CPU_SPEED),
    Table("Speed on a GPU", GPU_SPEED),
    Table("Server", SERVER),
    Table("Hostile input", HOSTILE),
    Table("Files", FILES),
)
SECTIONS = tuple(dict.fromkeys(line.section for table in TABLES for line in table.lines))
