"""Opens a GGUF file in llama-cpp-python for comparisons.

    model = open_model(path, n_ctx=128, type_k=llama_cpp.GGML_TYPE_F32)

Weights stay in the file's layout: llama.cpp's repacked AMX buffers use tile instructions whenever the
CPU announces them, and virtual machines that announce but do not grant them die of SIGILL.
"""

import llama_cpp


def open_model(path, n_ctx, n_threads=1, **options):
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_extra_buffers():
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = without_extra_buffers
    try:
        return llama_cpp.Llama(
            str(path), n_ctx=n_ctx, logits_all=True, n_threads=n_threads,
            n_threads_batch=n_threads, verbose=False, **options,
        )  # fmt: skip
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = defaults
