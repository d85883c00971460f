"""LoRA adapters: parsing, registry, loading between tiers, the device pool and its layers."""
