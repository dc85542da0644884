"""DeepInfer's own face: its entry point, argument names and environment variables.

llm.py           di.LLM                          engine_args.py    its arguments
sampling_params.py    its SamplingParams         environment.py    its DEEPINFER_* variables
"""
