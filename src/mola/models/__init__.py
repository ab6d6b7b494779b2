"""Networks for the benchmarks and the demo. `mola` itself takes any `nn.Module`."""
