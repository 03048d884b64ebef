"""Everything that imports sglang, and nothing else does. Loaded through the plugin entry point."""
