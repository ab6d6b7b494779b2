"""The laboratory: the paper's experiments, the methods it compares with, and their reports. It uses the library's public interface."""
