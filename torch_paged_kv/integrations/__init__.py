"""Where torch_paged_kv meets other libraries; each is imported by the one module named after it."""
