"""Forward hooks: record attention weights and head outputs of any model, or replace head outputs."""
