from .layer import count_cumsum, moe_general_routing_inputs, moe_TC_softmax_topk_layer, switch_loss
