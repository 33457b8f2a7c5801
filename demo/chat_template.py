"""The demo model's chat template: the one it was trained with, and tools."""

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# A conversation without tools reads as the model's own template writes it. "developer" is OpenAI's
# newer name for "system". Tools, calls and results are written in the form that vLLM's parser
# `hermes` reads, which is that of the model's larger sisters.
CHAT_TEMPLATE = (
    """\
{%- set turns = messages %}
{%- set system = '"""
    + SYSTEM_PROMPT
    + """' %}
{%- if messages and messages[0].role in ('system', 'developer') %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nTo call one, write ' }}
    {{- '<tool_call>{"name": ..., "arguments": {...}}</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role.replace('developer', 'system') + '\\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)
