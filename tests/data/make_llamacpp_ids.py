"""Write the token ids that llama.cpp gives for varied texts: the truth for tests/models/test_tokenizer.py.

Run in an environment that has llama-cpp-python (0.3.36 made the files here):
    python make_llamacpp_ids.py MODEL.gguf OUT.json
"""

import json
import sys
from pathlib import Path

TEXTS = [
    "",
    " ",
    "  ",
    "   leading spaces",
    "trailing spaces   ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    "line one\nline two\r\nline three\r",
    "\t",
    "\ttabbed\t\ttwice",
    " \t \n mixed \t\n\n  white ",
    "Hello",
    "Hello, world!",
    " Hello",
    "hello hello Hello HELLO",
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France?",
    "0",
    "7",
    "42",
    "1234567890",
    "12345678901234567890123",
    "3.14159",
    "-273.15 and +5",
    "1,000,000.00",
    "In 2024, 365 days; in 1999 too.",
    "a1b2c3",
    "v1.2.3-rc4",
    "2026-12-01T06:29:25Z",
    "+49 (0)30 1234567",
    "10:45pm, 50% off, $9.99",
    "0xDEADBEEF 0b1010 1e-9",
    "½ ¾ ² ³ ⅓",
    "٣٤٥ ۷۸۹ ४५६",
    "Ⅷ ⅻ ① ⑳",
    "１２３ fullwidth",
    "I'm, you're, he's, we'll, they've, I'd, don't",
    "I'M, YOU'RE, HE'S",
    "it’s a curly apostrophe",
    "'''quotes''' \"double\" `back`",
    "...!!!???",
    "!@#$%^&*()_+-=[]{}|;:,.<>/?~",
    "---- ==== **** ####",
    '<html><body class="x">text</body></html>',
    "https://example.com/path?query=1&other=two#frag",
    "user.name+tag@example.co.uk",
    "def f(x: int) -> int:\n    return x ** 2 + 1\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}',
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY 1;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "import torch\nimport numpy as np\n\n\nx = torch.zeros(3, 4)",
    "        deeply indented",
    'git commit -m "fix: #123" && git push',
    "C:\\Users\\name\\file.txt",
    "camelCase snake_case kebab-case SCREAMING_CASE",
    "supercalifragilisticexpialidocious",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "café naïve résumé coöperate",
    "cafe\u0301 (decomposed)",
    "Straße, Übermut, ähnlich, größer",
    "¿Dónde está la biblioteca? ¡Allí!",
    "Où est-ce que l'élève français a été hébergé ?",
    "Zażółć gęślą jaźń",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "日本語のテキストです。漢字とカタカナ。",
    "我能吞下玻璃而不伤身体。",
    "나는 유리를 먹을 수 있어요.",
    "هذا نص عربي، من اليمين إلى اليسار.",
    "זה טקסט בעברית",
    "नमस्ते दुनिया, यह हिन्दी है।",
    "สวัสดีชาวโลก",
    "வணக்கம் உலகம்",
    "გამარჯობა მსოფლიო",
    "Xin chào thế giới, tiếng Việt có dấu",
    "😀",
    "😀😃😄 three faces",
    "👨‍👩‍👧‍👦 family, 👍🏽 skin tone, 🇩🇪 flag",
    "❤️ vs ❤",
    "math: ∑ ∫ √ ≤ ≥ ≠ ∞ → ⇒ ∀x∈ℝ",
    "µm Å Ω € £ ¥ ₿",
    "non\u00a0breaking\u2003em\u200bzero\u3000ideographic",
    "\ufeffbyte order mark",
    "soft\u00adhyphen \u202eoverride\u202c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕞𝕒𝕥𝕙 𝒷ℴ𝓁𝒹",
    "\x00nul and \x07bell \x1b[31mred",
    "a" * 100,
    " " * 40 + "x",
    "ab" * 30,
    "\n" * 17 + "end",
    "- item 1\n- item 2\n  - sub item\n\n1. first\n2. second\n",
    "# Title\n\nSome *emphasis* and **bold**, `code`.\n\n```python\nprint('hi')\n```\n",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "Dear Sir or Madam,\n\nI am writing to you regarding invoice no. 00123-45.\n\nYours faithfully,\nA. N. Other",
    "word" + "\u0301" * 5 + " stacked marks",
    "ﬁ ﬂ ligatures, ǅ titlecase, ß sharp",
    "x² + y² = z², H₂O, 10⁻³",
    "l'œuvre d'art de l'été",
    "O'Neill's 'quoted' rock'n'roll",
    "<|not_a_token|> <s> </s> [INST]",
]


def main(gguf: str, out: str) -> None:
    import llama_cpp

    model = llama_cpp.Llama(model_path=gguf, vocab_only=True, verbose=False)
    rows = [{"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=False)} for text in TEXTS]
    made_by = f"llama-cpp-python {llama_cpp.__version__}"
    head = json.dumps({"made_by": made_by, "model": Path(gguf).name})[1:-1]
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(out).write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
