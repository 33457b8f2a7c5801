"""Every name of vLLM's that the executor uses, and what it expects of it: the whole seam.

vLLM promises none of them. Nothing here runs when requests are served: the contract holds it
against the vLLM that is installed (`tests/integration/test_vllm_seam.py`), and `make drift` against
the newest one. A name that the code uses and this file does not state fails that test.
"""
